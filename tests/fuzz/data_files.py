"""Data of a user: files, folders, saved data sets, held-out files, named sets and expressions."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import datasets
import pyarrow as pa  # type: ignore[import-untyped]
from hydra import compose, initialize_config_dir
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from rlhf.config.choices import Phase, Source
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.reading import describe_data, load_datasets
from rlhf.data.splits import blend_datasets, check_usable_examples, divide_over_phases
from rlhf.data.tokens import Limit, tokenise
from rlhf.models.tokenizers import train_tokenizer
from rlhf.options import DataConfig
from rlhf.options.ptx.corpus import ptx_texts
from tests.fuzz.case import Case

CONF = Path(__file__).parents[2] / "conf"
ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
Row = dict[str, Any]
# One damage is a function of the draw; it returns a Case.
Damage = Callable[[Random, Path], Case]


@cache
def config() -> DataConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_run_config(compose("config", ["data=local", "data.path=unset"])).data


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["\n\nHuman: hi\n\nAssistant: some words"], vocab_size=300)


def use(folder: Path, **changes: Any) -> Callable[[], None]:
    """What a run does with the data before its first step."""
    data = replace(config(), **changes)

    def act() -> None:
        loaded = load_datasets(data, seed=1)
        for each in loaded:
            assert each.layout in describe_data(each)
        divided = divide_over_phases(loaded, split=data.split, eval_share=data.eval_share, seed=1)
        parts = {phase: blend_datasets(found, seed=1) for phase, found in divided.items()}
        check_usable_examples(parts, [Phase.sft, Phase.reward, Phase.ppo])
        for phase in (Phase.sft, Phase.reward, Phase.ppo):
            tokenise(parts[phase], phase, tokenizer(), limit=LIMIT, cache_dir=folder / "cache")

    return act


LIMIT = Limit("max_tokens", 64)


def rows(draw: Random, count: int = 24) -> list[Row]:
    """Usable rows of one of the layouts with pairs."""
    layout = draw.randrange(4)
    made: list[Row] = []
    for n in range(count):
        ask, yes, no = f"question {n}", f"yes {n}", f"no {n}"
        text = f"\n\nHuman: {ask}\n\nAssistant:"
        layouts: list[Row] = [
            {"prompt": text, "chosen": f" {yes}", "rejected": f" {no}"},
            {"chosen": f"{text} {yes}", "rejected": f"{text} {no}"},
            {
                "prompt": [{"role": "user", "content": ask}],
                "chosen": [{"role": "assistant", "content": yes}],
                "rejected": [{"role": "assistant", "content": no}],
            },
            {
                "conversations": [{"from": "human", "value": ask}],
                "chosen": {"from": "gpt", "value": yes},
                "rejected": {"from": "gpt", "value": no},
            },
        ]
        made.append(layouts[layout])
    return made


def encoded(found: list[Any], ending: str) -> bytes:
    """The rows in the format of ``ending``; csv and parquet take what they can of them."""
    if ending == ".jsonl":
        return b"".join(json.dumps(row).encode() + b"\n" for row in found)
    if ending == ".json":
        return json.dumps(found).encode()
    if ending == ".csv":
        text = io.StringIO()
        objects = [row for row in found if isinstance(row, dict)]
        names = dict.fromkeys(str(name) for row in objects for name in row)
        writer = csv.writer(text)
        writer.writerow(names)
        writer.writerows([row.get(name) for name in names] for row in objects)
        return text.getvalue().encode(errors="backslashreplace")
    sink = pa.BufferOutputStream()
    try:
        table = pa.Table.from_pylist(found)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
        table = pa.table({"row": [json.dumps(row) for row in found]})
    parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def odd_value(draw: Random) -> Any:
    """A value that a column of text rarely holds."""
    deep: Any = "bottom"
    for _ in range(draw.choice([3, 90, 400])):
        deep = [deep] if draw.random() < 0.5 else {"content": deep}
    return draw.choice(
        [
            None,
            draw.randrange(10 ** draw.randrange(1, 300)),
            -draw.random() * 10.0 ** draw.randrange(300),
            float("nan"),
            float("inf"),
            draw.random() < 0.5,
            "",
            " \u2028\t",
            "\ud800",
            "\0" * draw.randrange(1, 9),
            "x" * draw.randrange(200_000),
            "\u202e" * draw.randrange(1, 99),
            [],
            {},
            [None],
            [[]],
            [draw.random()],
            {"role": "user"},
            {"role": draw.choice(["tool", "", None, 5, ["user"]]), "content": "x"},
            {"from": draw.choice(["human", "bot", None, {}]), "value": draw.choice([None, 1, "x"])},
            [{"role": "assistant", "content": draw.choice([None, "", [], {}, "x"])}],
            [{"role": "user", "content": "x"}] * draw.randrange(3),
            ["x", draw.randrange(99)],
            deep,
        ]
    )


def odd_values(draw: Random, folder: Path) -> Case:
    """Values of the wrong kind in some rows, in any format."""
    ending, found = draw.choice(ENDINGS), rows(draw)
    for _ in range(draw.choice([1, 3, 40])):
        row = draw.choice(found)
        row[draw.choice([*row, "extra", "text", "messages"])] = odd_value(draw)
    path = folder / f"a{ending}"
    path.write_bytes(encoded(found, ending))
    return Case(f"odd values in {ending}", use(folder, path=str(path)), must_refuse=False)


def odd_rows(draw: Random, folder: Path) -> Case:
    """A row that is no object, or columns that are no layout."""
    found: list[Any] = list(rows(draw))
    ending = draw.choice([".jsonl", ".json"])
    found.insert(
        draw.randrange(len(found)), draw.choice([None, draw.randrange(9), "text", [], [1], True])
    )
    path = folder / f"a{ending}"
    path.write_bytes(encoded(found, ending))
    return Case(f"a row that is no object in {ending}", use(folder, path=str(path)))


def other_columns(draw: Random, folder: Path) -> Case:
    """Columns that are missing or have other names; without the pairs PPO and reward need."""
    ending = draw.choice(ENDINGS)
    found = rows(draw)
    old = draw.choice(["chosen", "rejected"])
    new = draw.choice(["", "answer", "Chosen", "a" * 999, " chosen", "пр", "row", "\ud800"])
    renamed = [{new if k == old else k: v for k, v in row.items()} for row in found]
    path = folder / f"a{ending}"
    path.write_bytes(encoded(renamed, ending))
    return Case(f"column {old} is {new[:9]!r} in {ending}", use(folder, path=str(path)))


def damaged_bytes(draw: Random, folder: Path) -> Case:
    """Flipped, cut, doubled or inserted bytes of a good file of any format."""
    ending, found = draw.choice(ENDINGS), rows(draw)
    content = bytearray(encoded(found, ending))
    kind = draw.choice(["flip", "cut", "insert", "repeat"])
    for _ in range(draw.choice([1, 4, 60])):
        place = draw.randrange(len(content))
        if kind == "flip":
            content[place] = draw.randrange(256)
        elif kind == "insert":
            content[place:place] = draw.choice([b"\0", b"\xff", b'"', b"[", b"\n", b"{}", b"\r"])
        elif kind == "repeat":
            content[place:place] = content[place : place + draw.randrange(40)]
    if kind == "cut":
        del content[draw.randrange(len(content)) :]
    path = folder / f"a{ending}"
    path.write_bytes(content)
    return Case(f"{kind} bytes of {ending}", use(folder, path=str(path)), must_refuse=False)


def broken_text(draw: Random, folder: Path) -> Case:
    """Text that certainly is no table in its format."""
    good = encoded(rows(draw), ".jsonl")
    digits = b"9" * draw.randrange(4301, 9000)
    depth = draw.randrange(3000, 60_000)
    ending, content = draw.choice(
        [
            (".jsonl", good + b'{"prompt": ' + digits + b"}\n"),
            (".json", b'[{"prompt": "a", "n": ' + digits + b"}]"),
            (".jsonl", good + b'{"prompt": "a", "prompt": "b"}\n'),
            (".json", b'[{"prompt": "a", "n": {"x": 1, "x": 2}}]'),
            (draw.choice([".jsonl", ".json"]), b"[" * depth),
            (draw.choice([".jsonl", ".json"]), b'{"a":' * depth),
            (draw.choice([".jsonl", ".json", ".csv"]), good.decode().encode("utf-16")),
            (draw.choice([".jsonl", ".json", ".csv"]), good + b"\xe9\xe8" * depth),
            (draw.choice(ENDINGS), gzip.compress(good)),
            (draw.choice(ENDINGS), pickle.dumps(rows(draw))),
            (draw.choice(ENDINGS), b""),
            (draw.choice(ENDINGS), draw.choice([b"\n", b" ", b"\r\n"]) * depth),
            (draw.choice(ENDINGS), b"\x89PNG\r\n\x1a\n" + draw.randbytes(depth % 999)),
            (draw.choice([".gz", ".txt", ".xlsx", ".jsonl.gz", ""]), good),
            (".csv", good.replace(b",", draw.choice([b";", b"\t"]))),
            (".csv", b"prompt;chosen;rejected\n" + b"a;b;c\n" * 30),
            (".csv", b"prompt,prompt,chosen\n" + b"a,b,c\n" * 30),
            (".csv", b"prompt,chosen,rejected\n" + b"a,b\n" * draw.randrange(1, 30)),
            (".csv", b"prompt,chosen,rejected\na,b," + b"x" * draw.randrange(131_073, 300_000)),
            (".csv", b'prompt,chosen,rejected\na,b,"c\n' * draw.randrange(1, 30)),
            (".json", b"{" * draw.randrange(1, 99)),
            (".json", str(draw.random()).encode()),
        ]
    )
    path = folder / f"a{ending}"
    path.write_bytes(content)
    return Case(f"broken text {content[:20]!r} in {ending}", use(folder, path=str(path)))


def odd_parquet(draw: Random, folder: Path) -> Case:
    """Columns of kinds that Python may not hold, and columns of one name."""
    count = 24
    table = pa.Table.from_pylist([row for row in rows(draw, count)])
    far = draw.choice([-1, 1]) * draw.randrange(2**60, 2**62)
    unit = draw.choice(["ms", "us"])
    kind, column, must = draw.choice(
        [
            ("far times", pa.array([far] * count, pa.timestamp(unit)), True),
            ("no zone", pa.array([0] * count, pa.timestamp("us", tz="Mars/A")), True),
            ("far dates", pa.array([2**31 - 1] * count, pa.date32()), True),
            ("durations", pa.array([far] * count, pa.duration(unit)), False),
            ("times", pa.array([draw.randrange(2**40)] * count, pa.timestamp("ns")), False),
            ("bytes", pa.array([draw.randbytes(5)] * count), False),
            ("decimals", pa.array([draw.randrange(9)] * count).cast(pa.decimal128(38, 9)), False),
            ("nothing", pa.nulls(count), False),
            ("a dictionary", pa.array(["x", "y"] * 12).dictionary_encode(), False),
            ("a mapping", pa.array([[("a", 1)]] * count, pa.map_(pa.string(), pa.int8())), False),
        ]
    )
    name = draw.choice(["extra", "text", "id", "chosen"])
    twice = name in table.column_names
    parquet.write_table(table.append_column(name, column), folder / "a.parquet")
    case = use(folder, path=str(folder / "a.parquet"))
    return Case(f"parquet with {kind} as {name}", case, must_refuse=must or twice)


def damaged_saved(draw: Random, folder: Path) -> Case:
    """A save_to_disk folder with other JSON, flipped bytes or a file that is gone."""
    place = folder / "saved"
    saved: Any = datasets.Dataset.from_list(rows(draw))
    if draw.random() < 0.4:
        saved = datasets.DatasetDict({"train": saved, "test": saved})
    datasets.disable_progress_bars()
    saved.save_to_disk(place)
    files = sorted(file for file in place.rglob("*") if file.is_file())
    file = draw.choice(files)
    content = file.read_bytes()
    kind = draw.choice(["gone", "cut", "flip", "other", "key", "pipe", "link", "names"])
    if kind == "gone":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(content[: draw.randrange(len(content))])
    elif kind == "flip":
        changed = bytearray(content)
        for _ in range(draw.randrange(1, 30)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        file.write_bytes(changed)
    elif kind in {"pipe", "link"}:
        file.unlink()
        os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
    else:
        file = draw.choice([file for file in files if file.suffix == ".json"])
        values = [[], 5, "x", None, {}, 1e999, [[]], {"a": 1}, [5], ["../../../etc/passwd"]]
        value = draw.choice(values)
        if kind == "key" and isinstance(found := json.loads(file.read_text()), dict) and found:
            found[draw.choice(list(found))] = value
            value = found
        file.write_text(json.dumps(value))
    act = use(folder, path=str(place), source=draw.choice([Source.local, Source.hub]))
    return Case(f"saved data set, {kind}: {file.name}", act, must_refuse=kind in {"pipe", "link"})


def special_files(draw: Random, folder: Path) -> Case:
    """A folder with something that is no file beside good files, or such a thing itself."""
    place = folder / draw.choice(["train", "eval", "a"]) / "b"
    place.mkdir(parents=True)
    for n in range(draw.randrange(3)):
        (place / f"train{n}.jsonl").write_bytes(encoded(rows(draw), ".jsonl"))
    name = draw.choice(["a", "test", "z", "."]) + draw.choice([*ENDINGS, ".JSONL"])
    path = place / name
    kind = draw.choice(["pipe", "socket", "folder", "link", "device", "zero", "loop"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with chdir(place), socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
    elif kind == "folder":
        path.mkdir()
    else:
        targets = {"link": "nowhere", "device": "/dev/null", "zero": "/dev/zero", "loop": name}
        path.symlink_to(targets[kind])
    is_read = path.suffix.lower() in ENDINGS
    given = path if draw.random() < 0.3 else place
    if draw.random() < 0.3 and given is path:
        good = folder / "good.jsonl"
        good.write_bytes(encoded(rows(draw), ".jsonl"))
        act = use(folder, path=str(good), eval_path=str(given))
    else:
        act = use(folder, path=str(given))
    return Case(f"a {kind} called {name}", act, must_refuse=is_read or given is path)


def odd_paths(draw: Random, folder: Path) -> Case:
    """Paths that name nothing, in each of the keys that take one."""
    good = folder / "good.jsonl"
    good.write_bytes(encoded(rows(draw), ".jsonl"))
    path: Any = draw.choice(
        [
            f"~user{draw.randrange(999)}/x.jsonl",
            "x" * draw.randrange(256, 5000),
            "/".join("y" * 200 for _ in range(draw.randrange(21, 40))),
            f"a{draw.randrange(99)}\0b.jsonl",
            "\ud800.jsonl",
            f"/dev/fd/{draw.randrange(900, 999)}",
            "/proc/self/mem",
            f"{good}/below.jsonl",
            f"{folder}/missing{draw.randrange(99)}.jsonl",
            f"file://{good}",
            f"samples:{draw.randrange(99)}",
            "",
            " ",
        ]
    )
    key = draw.choice(["path", "eval_path", "sets", "list", "ptx"])
    changes: dict[str, Any] = {
        "path": {"path": path},
        "eval_path": {"path": str(good), "eval_path": path},
        "sets": {"path": None, "sets": {"mine": DatasetConfig(path=path)}},
        "list": {"path": [str(good), draw.choice([path, None, 5, [], {}, ""])]},
        "ptx": {"path": str(good), "ptx_path": path},
    }[key]

    def read_corpus() -> None:
        datasets.config.HF_HUB_OFFLINE = True  # a path that names nothing may be an id of the hub
        ptx_texts(replace(config(), **changes), seed=1)

    act = read_corpus if key == "ptx" else use(folder, **changes)
    return Case(f"{key}={str(path)[:20]!r}", act)


def expressions(draw: Random, folder: Path) -> Case:
    """Expressions of data.sets.NAME.columns, cut, joined and changed at random."""
    good = folder / "good.jsonl"
    good.write_bytes(encoded(rows(draw), ".jsonl"))
    words = ["prompt", "chosen", "a[0]", "human(", ")", "pick(", ",", "`1`", "'x'", "|", ".", "@"]
    words += ["[?", "]", "&", "max_by(", "sort(", "*", "remove(prompt, '(a+)+$')", "`[", "`", "!"]
    words += ["conversation(prompt, '', '')", "join(", "to_number(", "[::0]", "[9999999999999]"]
    text = "".join(draw.choice(words) for _ in range(draw.choice([1, 2, 3, 5, 400])))
    column = draw.choice(["prompt", "chosen", "rejected", "text", "responses", "other"])
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"} | {column: text}
    columns = {"text": text} if column == "text" else columns
    named = DatasetConfig(path=str(good), columns=columns, weight=draw.choice([1, 0.5, 3]))
    act = use(folder, path=None, sets={"mine": named})
    return Case(f"columns.{column}={text[:30]}", act, must_refuse=False)


def extremes(draw: Random, folder: Path) -> Case:
    """Very long texts, very many columns, and very few or equal rows."""
    found = rows(draw)
    kind = draw.choice(["few", "equal", "wide", "long", "names", "reversed"])
    if kind == "few":
        found = found[: draw.randrange(1, 4)]
    elif kind == "equal":
        found = [dict(found[0])] * draw.randrange(2, 500)
    elif kind == "wide":
        found = [row | {f"c{n}": n for n in range(draw.randrange(500, 2000))} for row in found]
    elif kind == "long":
        found[0] |= {"extra": "y" * draw.randrange(10**6), "chosen": "\n" * 10**5}
    elif kind == "names":
        found = [row | {"z" * draw.randrange(10**5): 1, "": 2} for row in found]
    else:
        found += [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in found]
    ending = draw.choice([".jsonl", ".json"])
    path = folder / f"a{ending}"
    path.write_bytes(encoded(found, ending))
    act = use(folder, path=str(path))
    return Case(f"{kind} rows in {ending}", act, must_refuse=kind in {"few", "equal"})


DAMAGES: tuple[Damage, ...] = (
    odd_values,
    odd_rows,
    other_columns,
    damaged_bytes,
    broken_text,
    odd_parquet,
    damaged_saved,
    special_files,
    odd_paths,
    expressions,
    extremes,
)


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield hostile data without end."""
    while True:
        yield draw.choice(DAMAGES)(draw, folder)
