"""The sixteen data sets of DeepSpeed-Chat: rows in their documented columns become records.

No network here: each set is read from a copy on disk, its path the only thing that differs from its
option in conf/data. What the hub holds today is not checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
from omegaconf import DictConfig, OmegaConf

from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.run import RunConfig
from rlhf.data.reading import load_datasets
from rlhf.data.records import RawDataset, Record
from rlhf.data.splits import blend_datasets, check_usable_examples, divide_over_phases

pytestmark = pytest.mark.slow

Compose = Callable[[list[str]], DictConfig]
Rows = list[dict[str, Any]]
ABSENT = {"prompt is null": 1}


def asked(text: str) -> str:
    return f"\n\nHuman: {text}\n\nAssistant:"


class Case(NamedTuple):
    """An option, its hub id and held-out split, rows, and what becomes of them."""

    option: str
    hub_id: str
    eval_split: str | None
    rows: Rows
    records: list[Record]
    left_out: dict[str, int] = {}  # noqa: RUF012 - never written to
    is_pairs: bool = True


HH = [
    {"prompt": asked("Hi"), "response": " Yes", "chosen": " Yes", "rejected": " No"},
    {"prompt": asked("a\n\nAssistant: b\n\nHuman: c"), "chosen": " d", "rejected": " e"},
    {"prompt": asked("Hi"), "chosen": " Same", "rejected": " Same"},
]
HH_RECORDS = [
    Record(asked("Hi"), " Yes", " No"),
    Record("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", " d", " e"),
]
EQUAL = {"chosen equals rejected": 1}


def compared(score_0: float | None, score_1: float | None, **texts: Any) -> dict[str, Any]:
    """A row of webgpt_comparisons."""
    question = {"dataset": "eli5", "id": "1", "full_text": "Why?"}
    quotes = {"title": ["T"], "extract": ["E"]}
    row = {"question": question, "quotes_0": quotes, "answer_0": "One [1].", "answer_1": "Two."}
    return row | {"score_0": score_0, "score_1": score_1} | texts


def passages(*texts: str) -> list[dict[str, str]]:
    return [{"docid": str(n), "title": "T", "text": text} for n, text in enumerate(texts)]


def miracl(query: str) -> tuple[Rows, list[Record]]:
    """Rows of MIRACL in one language: with both kinds of passages, with one kind, with none."""
    good, bad = passages("good", "better"), passages("bad", "worse")
    sides = [(good, bad), (good, []), ([], bad), ([], [])]
    rows = [
        {"query_id": "1", "query": f"{query}{n}", "positive_passages": p, "negative_passages": q}
        for n, (p, q) in enumerate(sides)
    ]
    records = [
        Record(asked(f"{query}0"), " good", " bad"),
        Record(asked(f"{query}1"), " good"),
        Record(asked(f"{query}2")),
        Record(asked(f"{query}3")),
    ]
    return rows, records


def mkqa(language: str) -> tuple[Rows, list[Record]]:
    """Rows of MKQA: answered, not answerable, without an answer, without a question."""
    answers = [
        [{"type": 5, "entity": "Q1", "text": "东京", "aliases": ["東京"]}, {"text": "x"}],
        [{"type": 8, "entity": "", "text": None, "aliases": []}],
        [],
        [{"text": "x"}],
    ]
    queries = ["首都", "无", "空", None]
    rows = [
        {"example_id": "1", "queries": {language: q, "en": "x"}, "answers": {language: a}}
        for q, a in zip(queries, answers, strict=True)
    ]
    return rows, [Record(asked("首都"), " 东京"), Record(asked("无")), Record(asked("空"))]


CASES = [
    Case("rm_static", "Dahoas/rm-static", "test", HH, HH_RECORDS, EQUAL),
    Case("full_hh_rlhf", "Dahoas/full-hh-rlhf", "test", HH, HH_RECORDS, EQUAL),
    Case(
        "synthetic_instruct",
        "Dahoas/synthetic-instruct-gptj-pairwise",
        None,
        [
            {"prompt": "Name a colour.", "chosen": "Red.", "rejected": "Dog."},
            {"prompt": " Count. ", "chosen": "1 2", "rejected": None},
            {"prompt": "", "chosen": "1", "rejected": "2"},
        ],
        [Record(asked("Name a colour."), " Red.", " Dog."), Record(asked("Count."), " 1 2")],
        ABSENT,
    ),
    Case(
        "rlhf_reward_datasets",
        "yitingxie/rlhf-reward-datasets",
        "test",
        [
            {
                "prompt": "\n\nHuman: Hi\n\n",
                "chosen": "Assistant: Yes",
                "rejected": "Assistant: No",
            },
            {
                "prompt": "Human: a\n\nAssistant: b\n\nHuman: c\n\n",
                "chosen": "Assistant: They said Assistant: d",
                "rejected": "e",
            },
            {"prompt": "\n\nHuman: Hi\n\n", "chosen": "Assistant:", "rejected": "Assistant: No"},
        ],
        [
            Record(asked("Hi"), " Yes", " No"),
            Record("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", " d", " e"),
            Record(asked("Hi")),
        ],
    ),
    Case(
        "webgpt_comparisons",
        "openai/webgpt_comparisons",
        None,
        [
            compared(0.5, -0.5),
            compared(-0.5, 0.5),
            compared(0.0, 0.0),  # a tie: the first one is chosen
            compared(1, 0, answer_0="A [1][2, 3] b (see there) c(d).", answer_1="[4]"),
            compared(None, 0.0),
            compared(1, 0, question={"full_text": None}),
        ],
        [
            Record(asked("Why?"), " One.", " Two."),
            Record(asked("Why?"), " Two.", " One."),
            Record(asked("Why?"), " One.", " Two."),
            Record(asked("Why?"), " A b c."),
            Record(asked("Why?")),
        ],
        ABSENT,
    ),
    Case(
        "shp",
        "stanfordnlp/SHP",
        "validation",
        [
            {"history": "Why?", "human_ref_A": "A", "human_ref_B": "B", "labels": 1, "score_A": 2},
            {"history": "Why?", "human_ref_A": "A", "human_ref_B": "B", "labels": 0, "score_A": 2},
            {"history": "How?", "human_ref_A": "A", "human_ref_B": None, "labels": 0},
            {"history": " ", "human_ref_A": "A", "human_ref_B": "B", "labels": 1},
        ],
        [
            Record(asked("Why?"), " A", " B"),
            Record(asked("Why?"), " B", " A"),
            Record(asked("How?")),
        ],
        ABSENT,
    ),
    Case(
        "sharegpt_alpaca",
        "pvduy/sharegpt_alpaca_oa_vicuna_format",
        "test",
        [
            {"prompt": "USER: Hi ASSISTANT:", "label": "Yes"},
            {"prompt": "USER: a\nASSISTANT: b\nUSER: c\nASSISTANT:", "label": "d"},
            {"prompt": "USER: Hi ASSISTANT:", "label": ""},
            {"prompt": None, "label": "x"},
        ],
        [
            Record(asked("Hi"), " Yes"),
            Record("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", " d"),
            Record(asked("Hi")),
        ],
        ABSENT,
        is_pairs=False,
    ),
    Case(
        "zhihu_kol",
        "wangrui6/Zhihu-KOL",
        None,
        [
            {"INSTRUCTION": "怎么", "RESPONSE": "这样。", "SOURCE": "Zhihu", "METADATA": "{}"},
            {"INSTRUCTION": "为何", "RESPONSE": None},
            {"INSTRUCTION": None, "RESPONSE": "x"},
        ],
        [Record(asked("怎么"), " 这样。"), Record(asked("为何"))],
        ABSENT,
        is_pairs=False,
    ),
    Case("miracl_zh", "Cohere/miracl-zh-queries-22-12", "dev", *miracl("问")),
    Case(
        "hc3_chinese",
        "Hello-SimpleAI/HC3-Chinese",
        None,
        [
            {
                "id": "1",
                "question": "问",
                "human_answers": ["甲", "乙"],
                "chatgpt_answers": ["x"],
            },
            {"id": "2", "question": "空", "human_answers": [], "chatgpt_answers": []},
            {"id": "3", "question": "", "human_answers": ["甲"], "chatgpt_answers": []},
        ],
        [Record(asked("问"), " 甲"), Record(asked("空"))],
        ABSENT,
        is_pairs=False,
    ),
    Case("mkqa_chinese", "apple/mkqa", None, *mkqa("zh_cn"), ABSENT, is_pairs=False),
    Case("mkqa_japanese", "apple/mkqa", None, *mkqa("ja"), ABSENT, is_pairs=False),
    Case("miracl_ja", "Cohere/miracl-ja-queries-22-12", "dev", *miracl("問")),
    Case(
        "qg_jaquad",
        "lmqg/qg_jaquad",
        "validation",
        [
            {"question": "いつ", "sentence": "春です。", "answer": "春", "paragraph": "p"},
            {"question": "なぜ", "sentence": None, "answer": "x", "paragraph": "p"},
            {"question": None, "sentence": "文", "answer": "x", "paragraph": "p"},
        ],
        [Record(asked("いつ"), " 春です。"), Record(asked("なぜ"))],
        ABSENT,
        is_pairs=False,
    ),
    Case(
        "qag_jaquad",
        "lmqg/qag_jaquad",
        "validation",
        [
            {"questions": ["いつ", "どこ"], "answers": ["春", "東"], "paragraph": "段落"},
            {"questions": ["なぜ"], "answers": [], "paragraph": ""},
            {"questions": [], "answers": [], "paragraph": "段落"},
        ],
        [Record(asked("いつ"), " 段落"), Record(asked("なぜ"))],
        ABSENT,
        is_pairs=False,
    ),
]


def write_splits(case: Case, folder: Path, *, is_saved: bool) -> None:
    """The rows as each split that the option names."""
    splits = ["train", *([case.eval_split] if case.eval_split else [])]
    if is_saved:
        table = datasets.Dataset.from_list(case.rows)
        datasets.DatasetDict(dict.fromkeys(splits, table)).save_to_disk(folder)
        return
    for split in splits:
        lines = "".join(f"{json.dumps(row)}\n" for row in case.rows)
        (folder / f"{split}.jsonl").write_text(lines)


def load(compose: Compose, option: str, *overrides: str) -> list[RawDataset]:
    config = to_run_config(compose([f"data={option}", "data.deduplicate=false", *overrides]))
    return load_datasets(config.data, seed=config.seed)


def texts_of(records: Sequence[Record]) -> list[Record]:
    """Return the records without their places, and without messages, which their prompts show."""
    assert all(record.place is not None for record in records)
    return [record._replace(place=None, messages=None) for record in records]


@pytest.mark.parametrize("case", CASES, ids=[case.option for case in CASES])
def test_rows_become_records(case: Case, tmp_path: Path, compose: Compose) -> None:
    # Any set can be read from both forms; every other one takes the second.
    write_splits(case, tmp_path, is_saved=bool(CASES.index(case) % 2))
    override = f"data.sets.{case.option}.path={tmp_path}"
    (dataset,) = load(compose, case.option, override)
    assert dataset.name == case.option
    hub_set = to_run_config(compose([f"data={case.option}"])).data.sets[case.option]
    assert hub_set.path == case.hub_id
    assert texts_of(dataset.train) == case.records
    sides = 1 if case.eval_split is None else 2
    held_out = None if dataset.eval is None else texts_of(dataset.eval)
    assert held_out == (None if sides == 1 else case.records)
    assert dataset.left_out == {reason: sides * n for reason, n in case.left_out.items()}
    assert any(record.rejected for record in dataset.train) is case.is_pairs
    assert dataset.phases == (None if case.is_pairs else [Phase.sft, Phase.ppo])


# ------------------------------------------------------------------------------------------ blends


BLENDS = {
    "deepspeed_chat": ["rm_static", "full_hh_rlhf", "synthetic_instruct", "rlhf_reward_datasets"],
    "chinese": ["zhihu_kol", "miracl_zh", "hc3_chinese", "mkqa_chinese"],
    "japanese": ["mkqa_japanese", "miracl_ja", "qg_jaquad", "qag_jaquad"],
}
BLENDS["deepspeed_chat_benchmark"] = [*BLENDS["deepspeed_chat"], "webgpt_comparisons", "shp"]


def test_blend_is_the_union_of_its_sets(compose: Compose) -> None:
    for name, options in BLENDS.items():
        blended: Any = OmegaConf.to_container(compose([f"data={name}"]).data.sets)
        assert list(blended) == options
        for option in options:
            alone: Any = OmegaConf.to_container(compose([f"data={option}"]).data.sets[option])
            only_sft = {"phases": ["sft"]} if name in {"chinese", "japanese"} else {}
            assert blended[option] == (alone | only_sft if "phases" in alone else alone)


def many_rows(case: Case, count: int = 40) -> Rows:
    """The first row ``count`` times, each with a number in every text."""
    text = json.dumps(case.rows[0])

    def numbered(value: Any, n: int) -> Any:
        if isinstance(value, dict):
            return {key: numbered(inner, n) for key, inner in value.items()}
        if isinstance(value, list):
            return [numbered(inner, n) for inner in value]
        if not isinstance(value, str):
            return value
        return value.replace("\n\nAssistant:", f" {n}\n\nAssistant:") + (
            "" if value.endswith((":", "\n")) else f" {n}"
        )

    return [numbered(json.loads(text), n) for n in range(count)]


@pytest.mark.parametrize("name", ["deepspeed_chat", "chinese"])
def test_blend_serves_the_whole_pipeline(name: str, compose: Compose, tmp_path: Path) -> None:
    overrides = [f"data={name}"]
    for case in CASES:
        if case.option in BLENDS[name]:
            (tmp_path / case.option).mkdir()
            write_splits(
                case._replace(rows=many_rows(case)), tmp_path / case.option, is_saved=False
            )
            overrides += [
                f"data.sets.{case.option}.path={tmp_path / case.option}",
                f"++data.sets.{case.option}.eval_split=null",
            ]
    config: RunConfig = to_run_config(compose(overrides))
    data = config.data
    raw = load_datasets(data, seed=1)
    divided = divide_over_phases(raw, split=data.split, eval_share=data.eval_share, seed=1)
    parts = {phase: blend_datasets(of_sets, seed=1) for phase, of_sets in divided.items()}
    check_usable_examples(parts, list(Phase))
    keys = [{r.prompt for r in side} for part in parts.values() for side in (part.train, part.eval)]
    assert sum(map(len, keys)) == len(set().union(*keys))
    if name == "deepspeed_chat":  # rm_static and full_hh_rlhf hold the same rows here
        assert raw[0].left_out.total() == 0
        assert raw[1].left_out["repeats an earlier example"] > 0
    if name in {"chinese", "japanese"}:
        assert all(record.rejected for record in parts[Phase.reward].train)
