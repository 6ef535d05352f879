"""Rows as people have them become records, or are refused by name: layouts.yaml has the rows."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import DataError
from rlhf.config.freeze import to_run_config
from rlhf.data.detect import detect_layout, read_layouts
from rlhf.data.reading import describe_dataset, load_datasets
from rlhf.data.records import Record, Row

from .row_tables import NUMBERS, asked, fill, read, read_tables, records_of, rows_of, said
from .talks import to_records

USED, REFUSED, COUNTED = read_tables("layouts.yaml")


def bare(records: Sequence[Record]) -> list[Record]:
    """Return the records without their places, columns, and messages, which their prompts show."""
    return [each._replace(place=None, messages=None, columns=None, turns=()) for each in records]


@pytest.mark.parametrize("name", USED)
def test_rows_are_used_right(name: str, tmp_path: Path) -> None:
    case = USED[name]
    found = read(tmp_path / "rows.jsonl", rows_of(case))
    assert sorted(bare(found.train), key=str) == sorted(records_of(case), key=str)
    line = describe_dataset(found)
    assert [part for part in case.get("says", []) if part not in line] == [], line


def test_the_table_has_every_layout(tmp_path: Path) -> None:
    # A test per layout that none of the rows above has would not be missed.
    unseen = {layout.name for layout in read_layouts() if not layout.refuse}
    for case in USED.values():
        rows = [Row("f", n, row) for n, row in enumerate(rows_of(case))]
        unseen.discard(detect_layout(rows, source="f").name)
    assert not unseen


# Files; of the same rows where their form allows it. Another form is another row.
NESTED = ("messages, several turns #14", "UltraFeedback", "ShareGPT, preference #7", "verl #21")
FLAT = ("texts that look like missing values #32", "Alpaca #8", "SHP", "HelpSteer 2 #3")
FLAT += ("texts with quotes, commas and ends of lines",)
FORMS = {
    "rows.jsonl": NESTED + FLAT,
    "rows.json": NESTED + FLAT,
    "one.json": NESTED + FLAT,
    "rows.parquet": NESTED + FLAT,
    "saved": NESTED + FLAT,
    "rows.csv": FLAT,
    "rows.tsv": FLAT,
}


@pytest.mark.parametrize("form", FORMS)
def test_files_of_every_form_have_the_same_rows(form: str, tmp_path: Path) -> None:
    for number, name in enumerate(FORMS[form]):
        (tmp_path / str(number)).mkdir()
        found = read(tmp_path / str(number) / form, rows_of(USED[name]))
        assert sorted(bare(found.train), key=str) == sorted(records_of(USED[name]), key=str)


@pytest.mark.parametrize("name", REFUSED)
def test_rows_are_refused_by_name(name: str, tmp_path: Path) -> None:
    case = REFUSED[name]
    with pytest.raises(DataError) as refused:
        read(tmp_path / "rows.jsonl", [fill(case["row"], 0)] * 5)
    assert [part for part in case["says"] if part not in str(refused.value)] == [], refused.value


def test_the_advised_line_reads_the_rows(
    compose: Callable[[list[str]], Any], tmp_path: Path
) -> None:
    rows = [{"question": f"{n}", "reply": "Yes"} for n in NUMBERS]
    with pytest.raises(DataError) as refused:
        read(tmp_path / "my rows.jsonl", rows)
    line = shlex.split(str(refused.value).rpartition(": data=local data.path=null ")[2])
    config = to_run_config(
        compose(["data=local", "data.path=null", *(f"+{each}" for each in line)])
    )
    (found,) = load_datasets(config.data, seed=0)
    assert bare(found.train) == [Record(asked(f"u{n}"), " Yes") for n in NUMBERS]


def test_explicit_columns_read_what_detection_refuses(tmp_path: Path) -> None:
    columns = {"prompt": "human(question)", "system": "system", "chosen": "chosen"}
    row = {"system": "Be kind.", "question": "Name a fruit.", "chosen": "fig", "rejected": "drum"}
    raw = read(tmp_path / "rows.jsonl", [row | {"id": 7}], columns=columns)  # 4, 5, 20
    assert raw.train[0].prompt == "\n\nSystem: Be kind.\n\nHuman: Name a fruit.\n\nAssistant:"
    assert describe_dataset(raw).endswith("not read: rejected, id")


# ---------------------------------------------------------------------------- rows that are counted

PROMPT = asked("uHi")
ASK, YES, NO = said("uHi"), said("aYes"), said("aNo")


@pytest.mark.parametrize(
    ("reason", "row"), [(why, row) for why, rows in COUNTED["counted"].items() for row in rows]
)
def test_unusable_row_is_counted(reason: str, row: dict[str, Any]) -> None:
    usable = next(each for each in COUNTED["usable"] if each.keys() == row.keys())
    rows = [Row("a.jsonl", n, each) for n, each in enumerate([usable, row, usable, row], 1)]
    converted = to_records(rows, source="a.jsonl")
    assert len(converted.records) == 2
    assert list(converted.left_out.values()) == [2]
    ((found, places),) = converted.left_out.places.items()
    assert reason in found
    assert places == [("a.jsonl", 2), ("a.jsonl", 4)]


# --------------------------------------------------------------------------- columns, marks, spaces


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ("prompt chosen rejected completion text", "preference"),
        ("prompt completion chosen", "preference"),
        ("prompt completion responses", "ranking"),
        ("prompt response chosen rejected", "preference"),
        ("chosen rejected text", "implicit-prompt preference"),
        ("prompt text", "prompt-only"),
        ("instruction output prompt text", "Alpaca"),
        ("prompt chosen", "preference"),
        ("problem solution messages", "language modelling, messages"),
    ],
)
def test_the_most_specific_layout_wins(columns: str, name: str) -> None:
    values = {column: ["x"] if column == "responses" else "x" for column in columns.split()}
    row = Row("data.jsonl", 1, values)
    assert detect_layout([row], source="data.jsonl").name == name


def test_columns_are_those_of_all_rows() -> None:
    rows = [{"prompt": None, "chosen": YES}, {"prompt": ASK, "chosen": YES, "rejected": NO}]
    converted = to_records([Row("f", n, row) for n, row in enumerate(rows)], source="f")
    assert bare(converted.records) == [Record(PROMPT, " Yes", " No")]
    assert converted.left_out == {"prompt is null": 1}


def test_scored_pairs_have_margins_and_scores_as_columns() -> None:
    keep = {"margin": "reward.margin_column", "rejected_score": "reward.score_columns"}
    scored = {"prompt": "Q:", "responses": ["a", "b"], "scores": [0.5, 3]}
    rows = [{"prompt": "Q:", "response": text, "rating": n} for n, text in enumerate("abc")]
    for given, margins in (([scored], [2.5]), (rows, [1.0, 2.0, 1.0])):
        found = [Row("f", n, row) for n, row in enumerate(given)]
        columns = [each.columns or {} for each in to_records(found, source="f", keep=keep).records]
        assert [each["margin"] for each in columns] == margins
        assert all(each.keys() == keep.keys() for each in columns)


def test_rewards_read_columns_and_their_fields() -> None:
    row = {"prompt": "Hi", "answer": "#### 42", "reward_model": {"ground_truth": "42"}}
    key = "rewards.right.columns"
    keep = {"answer": key, "reward_model.ground_truth": key}
    (record,) = to_records([Row("f", 1, row)], source="f", keep=keep).records  # 20, 21
    assert record.columns == {"answer": "#### 42", "reward_model.ground_truth": "42"}
    with pytest.raises(DataError, match=r"row 1: column 'reward_model\.x' is missing; rewards"):
        to_records([Row("f", 1, row)], source="f", keep={"reward_model.x": key})
    marked = {"prompt": "Hi", "completion": "Yes", "label": "42"}  # a reward reads it: no grade
    (record,) = to_records([Row("f", 1, marked)], source="f", keep={"label": key}).records
    assert (record.grade, record.columns) == (None, {"label": "42"})


@pytest.mark.parametrize(
    ("prompt", "response", "joined"),
    [
        ("Human: a Assistant:", "b", "Human: a Assistant: b"),  # DeepSpeed-Chat's local json
        ("Human: a Assistant:", " b", "Human: a Assistant: b"),
        ("Human: a Assistant: ", "b", "Human: a Assistant: b"),
        ("Q: a\n", "b", "Q: a\nb"),
    ],
)
def test_one_space_where_there_is_none(prompt: str, response: str, joined: str) -> None:
    row = {"prompt": prompt, "chosen": response, "rejected": f"{response}!"}
    (record,) = to_records([Row("f", 1, row)], source="f").records
    assert (record.prompt, record.rejected) == (prompt, f"{record.chosen}!")
    assert f"{prompt}{record.chosen}" == joined
