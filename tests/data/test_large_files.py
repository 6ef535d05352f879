"""Files too large for a list give the same records, counts and division as small files."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing

from rlhf.base.errors import DataError
from rlhf.config.choices import Phase
from rlhf.data import files, reading, tokens
from rlhf.data.reading import describe_dataset, load_datasets, run_in_order
from rlhf.data.records import Message, RawDataset, Record, render_prompt
from rlhf.data.splits import PhaseData, blend_datasets, divide_over_phases
from rlhf.data.stored import Store, pack_records, select_all, take
from rlhf.data.tokens import Limit, TokensOnDemand, is_byte_level, tokenise
from rlhf.models.tokenizers import train_tokenizer
from tests.data.row_tables import Rows, config_of, write

HI = [{"role": "user", "content": f"Hi {n}\r\n"} for n in range(40)]
ONE = {"role": "assistant", "content": "one\u0301 "}
PROMPTS: Rows = [{"prompt": f"p {n % 31}", "completion": f"c{n % 7}"} for n in range(90)]
PAIRS: Rows = [{"prompt": f"p{n}", "chosen": f"{n % 3}", "rejected": f"{n % 2}"} for n in range(60)]
TALKS: Rows = [{"messages": [HI[n], ONE] * (n % 3 + 1), "n": n} for n in range(1, 40)]
UNUSABLE: Rows = [{"prompt": "a", "completion": " "}, {"prompt": "\x07", "completion": "b"}]
SIDES = ("training", "test-1", "training")
EVAL: Rows = [{"prompt": f"p {n}", "completion": "x"} for n in range(25, 36)]
FILES: dict[str, dict[str, Rows]] = {
    "prompts": {"train.jsonl": [*PROMPTS, *UNUSABLE, *PROMPTS], "val.csv": EVAL},
    "pairs of two files": {"a.parquet": PAIRS, "b.jsonl": PAIRS[5:20]},
    "conversations": {"a.parquet": TALKS, "b.jsonl": TALKS},
    "messages as texts, held out by a column": {
        "a.csv": [
            {"messages": json.dumps([HI[n % 40], ONE]), "s": SIDES[n // 30]} for n in range(90)
        ]
    },
    "texts": {"a.csv": [{"text": f"t{n}"} for n in range(30)]},
    "no UTF-8": {"a.jsonl": [{"prompt": f"{n}\ud800"} for n in range(30)]},
    "a list": {"a.json": PROMPTS},
}


def read(path: object, *, cache: Path | None, **changes: Any) -> list[RawDataset]:
    """Data sets whose files are all large if there is a ``cache``, and otherwise small."""
    settings = {"clean": True, "deduplicate": True, "cache_dir": str(cache), **changes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "LARGE_BYTES", -1 if cache else 2**40)
        keep = settings.pop("keep", {})
        return load_datasets(config_of(path, **settings), seed=0, keep=keep)


def as_lists(found: list[RawDataset]) -> list[object]:
    return [
        each._replace(train=list(each.train), eval=None if each.eval is None else list(each.eval))
        for each in found
    ]


def divide(found: list[RawDataset]) -> dict[Phase, tuple[list[object], list[object], int]]:
    parts = divide_over_phases(found, split=[2, 4, 4], eval_share=0.2, seed=3)
    blended = {phase: blend_datasets(each, seed=3) for phase, each in parts.items()}
    return {phase: (list(p.train), list(p.eval), p.removed) for phase, p in blended.items()}


@pytest.fixture(params=[1, 2, 3])
def processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every file has chunks of seven rows, and is read by this number of processes."""
    monkeypatch.setattr(files, "CHUNK", 7)
    monkeypatch.setattr(reading, "count_processes", lambda: request.param)
    return int(request.param)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("target", ["grade", "responses"])
def test_a_response_is_paired_with_those_of_other_chunks(target: str, tmp_path: Path) -> None:
    texts = [(f"p {n % 31}", f"c{n}", n % 4 + 0.5) for n in range(90)]
    rows: Rows = [{"prompt": p, "responses": [c], "scores": [score]} for p, c, score in texts]
    if target == "grade":
        rows = [{"prompt": p, "completion": c, "score": score} for p, c, score in texts]
    write(tmp_path / "a.jsonl", rows)
    (small,), (large,) = read(tmp_path, cache=None), read(tmp_path, cache=tmp_path / "cache")
    assert as_lists([large]) == [small]
    assert sum(1 for each in small.train if each.rejected) > 31, "three responses to a prompt"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", FILES)
def test_a_large_file_is_read_like_a_small_one(name: str, tmp_path: Path) -> None:
    for file, rows in FILES[name].items():
        write(tmp_path / file, rows)
    clean = name != "no UTF-8"  # cleaning removes lone surrogates
    small, large = (
        read(tmp_path, cache=cache, clean=clean) for cache in (None, tmp_path / "cache")
    )
    assert not any(isinstance(each.train, list) for each in large)
    assert as_lists(large) == small
    assert [*map(describe_dataset, large)] == [*map(describe_dataset, small)]
    assert divide(large) == divide(small)
    assert large[0].train[2:5] == small[0].train[2:5]
    assert list((tmp_path / "cache").iterdir()) == []  # the stored records have no name


@pytest.mark.usefixtures("processes")
def test_large_and_small_sets_are_blended(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", PROMPTS)
    (tmp_path / "b.jsonl.gz").write_bytes(
        gzip.compress(write(tmp_path / "b.jsonl", PROMPTS[20:50]).read_bytes())
    )
    paths = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")]
    small, large = read(paths, cache=None), read(paths, cache=tmp_path / "cache")
    mixed = [large[0]._replace(weight=1.5), small[1]]
    assert divide(mixed) == divide([small[0]._replace(weight=1.5), small[1]])


SAID = json.dumps([HI[0], ONE])
# Rows, and how they are refused, whatever the first chunk holds.
LATE_DOUBTS: dict[str, tuple[Rows, str]] = {
    "a mark": (
        [row | {"ok": n < 60} for n, row in enumerate(PROMPTS)],
        "'ok' (True, False) may say",
    ),
    "a text": ([{"messages": SAID if n < 60 else "a"} for n in range(90)], "is not a list of"),
    "a side": ([r | {"s": "train test x".split()[n // 30]} for n, r in enumerate(PROMPTS)], "'s'"),
}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", LATE_DOUBTS)
def test_columns_are_judged_by_all_rows(name: str, tmp_path: Path) -> None:
    rows, message = LATE_DOUBTS[name]
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(DataError, match=re.escape(message)):
            read(write(tmp_path / "a.jsonl", rows), cache=cache)


LATE: Rows = [{"prompt": "q", "completion": "r", "tag": "x"}]
DATED = [row | {"when": datetime(2026, 1, n % 28 + 1)} for n, row in enumerate(PROMPTS)]
# The file, its rows, settings, and a part of the fourth record.
AT_ONCE: dict[str, tuple[str, Rows, dict[str, Any], str]] = {
    "no JSON": ("a.parquet", DATED, {"keep": {"when": "rewards.late.columns"}}, "(2026, 1, 4, "),
    "a late column": ("a.jsonl", PROMPTS + LATE, {}, "p 3"),
    "a late score": (
        "a.jsonl",
        [r | {"label": n // 80 * 2} for n, r in enumerate(PROMPTS)],
        {},
        "p 19",
    ),
    "a late value": ("a.jsonl", [row | {"tag": None} for row in PROMPTS] + LATE, {}, "p 3"),
}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", AT_ONCE)
def test_rows_that_are_converted_at_once(name: str, tmp_path: Path) -> None:
    file, rows, settings, shown = AT_ONCE[name]
    write(tmp_path / file, rows)
    settings |= {"deduplicate": False}
    small, large = (
        read(tmp_path / file, cache=cache, **settings) for cache in (None, tmp_path / "cache")
    )
    assert large == small
    assert isinstance(large[0].train, list)
    assert shown in str(small[0].train[3])


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "a"}\n' * 50 + b'{"prompt": "a"]\n' + b"[1]\n" * 20,
        b'{"prompt": "a"}\n' * 50 + b"[1]\n" * 20,
        b'{"prompt": "a"}\n' * 50 + b'{"prompt": 5}\n' * 20,
        b'{"prompt": ""}\n' * 30,
        b'{"prompt": "a"}\n' * 30 + b'"\xff"\n',
        b"\n" * 30,
    ],
)
def test_large_files_are_refused_like_small_ones(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError) as small:
        read(file, cache=None)
    with pytest.raises(DataError) as large:
        read(file, cache=tmp_path / "cache")
    assert str(large.value) == str(small.value)


def test_a_cache_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", PROMPTS)
    with pytest.raises(DataError, match=r"data.cache_dir=.*a.jsonl/x cannot be used .*RLHF_CACHE"):
        read(file, cache=file / "x")


def leave(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail(number: int) -> int:
    raise DataError(f"process {number}")


@pytest.mark.parametrize(
    ("work", "message"), [(leave, "ended early.*memory may have run out"), (fail, "process 0")]
)
def test_a_process_that_fails(work: Callable[[int], int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(run_in_order([partial(work, number) for number in range(9)], 2))


def test_tasks_are_run_in_order_and_not_far_ahead() -> None:
    begun = []

    def list_tasks() -> Iterator[Callable[[], int]]:
        for number in range(30):
            begun.append(number)
            yield partial(abs, -number)

    results = run_in_order(list_tasks(), 2)
    assert [next(results), next(results)] == [0, 1]
    assert len(begun) < 10
    assert list(results) == list(range(2, 30))


def test_the_error_of_an_earlier_chunk_comes_first() -> None:
    def list_tasks() -> Iterator[Callable[[], int]]:
        yield partial(fail, 0)
        raise DataError("the file ends early")

    with pytest.raises(DataError, match="process 0"):
        list(run_in_order(list_tasks(), 2))


# ----------------------------------------------------------------------------------- token ids

MARKED = (Message("user", "a <|pad|>"),)
SAID = (Message("user", "Hi there"), Message("assistant", "one"), Message("user", "and?"))
RECORDS = [
    *[Record(prompt=f"p{n} ", chosen="ab" * (n % 9)) for n in range(30)],
    Record(prompt="cafe\u0301", chosen="e\u0301"),
    Record(prompt="x" * 39, chosen="é"),
    Record(text="a text"),
    Record(text="y" * 60),
    Record(prompt="only asked"),
    Record(prompt="bad", chosen="answer", grade=False),
    Record(prompt="good", chosen="answer", grade=True),
    Record(prompt="a pair", chosen="b", rejected="c"),
    Record(prompt=render_prompt(SAID[:1]), chosen=" one", messages=SAID[:1]),
    Record(prompt=render_prompt(MARKED), chosen=" one", messages=MARKED),
    Record(prompt=render_prompt(SAID[:1]), chosen=" <|pad|>", messages=SAID[:1]),
    Record(
        prompt=render_prompt(SAID), chosen=" two", messages=SAID, turns=(*SAID, SAID[1]), columns={}
    ),
]
TOOLS = Record(prompt="asks a tool", chosen=" x", messages=SAID[:1], tools=[{"name": "f"}])


def stored(records: list[Record], folder: Path) -> Sequence[Record]:
    with TemporaryFile(dir=folder) as file:
        return select_all(Store([pack_records(records[:7]), pack_records(records[7:])], file))


@pytest.mark.parametrize("phase", [Phase.sft, Phase.ppo])
@pytest.mark.parametrize("limit", [9, 42, 500])
@pytest.mark.parametrize("opens", [False, True])
def test_ids_are_encoded_when_they_are_read(
    phase: Phase, limit: int, opens: bool, tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(["ab one two"], vocab_size=262)
    if opens:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|pad|> $A", special_tokens=[("<|pad|>", tokenizer.pad_token_id)]
        )
    settings: Any = {"limit": Limit("max", limit), "cache_dir": tmp_path}
    whole = tokenise(PhaseData(RECORDS, RECORDS[:3]), phase, tokenizer, **settings)
    part = PhaseData(take(stored(RECORDS, tmp_path), range(len(RECORDS))), RECORDS[:3])
    found = tokenise(part, phase, tokenizer, **settings)
    assert isinstance(found.train, TokensOnDemand)
    assert len(found.train) == len(whole.train)
    assert found.train["row"] == list(whole.train["row"])
    assert found.left_out == {reason: n for reason, n in whole.left_out.items() if n}
    order = [*range(0, len(whole.train), 2), 0, len(whole.train) - 1]
    expected = whole.train[order]
    if not any(expected.get("observed", [])):
        expected.pop("observed", None)
    assert found.train[order] == expected
    if phase is Phase.sft:
        assert found.eval[:2]["length"] == whole.eval[:2]["length"]


def test_other_examples_are_encoded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer(["ab one two"], vocab_size=262)
    settings: Any = {"limit": Limit("max", 500), "cache_dir": tmp_path}
    part = PhaseData(stored([*RECORDS[:30], TOOLS], tmp_path), RECORDS[:3])
    found = [tokenise(part, phase, tokenizer, **settings) for phase in (Phase.sft, Phase.reward)]
    monkeypatch.setattr(tokens, "MOST_DOUBTFUL", 0)
    found.append(tokenise(part, Phase.ppo, tokenizer, **settings))
    assert not any(isinstance(each.train, TokensOnDemand) for each in found)


def test_a_tokenizer_that_normalizes_may_make_more_tokens_than_bytes() -> None:
    tokenizer = train_tokenizer(["ab one two"], vocab_size=262)
    assert is_byte_level(tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    assert is_byte_level(tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    assert not is_byte_level(tokenizer)
