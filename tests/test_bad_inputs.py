"""Every bad input of the catalogue gets an answer, and no traceback."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from rlhf.base.errors import RlhfError
from rlhf.config.choices import Source
from rlhf.config.freeze import to_run_config
from rlhf.data.reading import describe_data, load_datasets
from tests.bad_inputs import all_answers
from tests.bad_inputs.doors import GOOD

Compose = Callable[[list[str]], DictConfig]


@pytest.mark.slow
def test_every_bad_input_gets_its_answer(compose: Compose, tmp_path: Path) -> None:
    before = dict(os.environ)

    def set_environment(variables: Mapping[str, str]) -> None:
        os.environ.clear()
        os.environ.update(before, **variables)

    answers = all_answers(compose, tmp_path / "in", set_environment)
    assert [answer for answer in answers if not answer.text] == [], "accepted in silence"
    assert len(answers) >= 200
    assert len({(answer.door, answer.label) for answer in answers}) == len(answers)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)
COLUMNS = st.sampled_from(["prompt", "chosen", "rejected", "messages", "text", "responses", "x"])


@pytest.mark.slow
def test_rows_of_any_kind_are_used_counted_or_refused(compose: Compose, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    data = replace(to_run_config(compose([])).data, source=Source.local, path=str(path))

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(rows=st.lists(JSON | st.dictionaries(COLUMNS, JSON, min_size=1), min_size=1, max_size=4))
    def answers(rows: list[object]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        try:
            (found,) = load_datasets(data, seed=1)
            told = f"{path}{describe_data(found)}"
        except RlhfError as error:
            told = f"{error} 0 skipped"
        assert str(path) in told
        assert re.search(r"\d skipped", told)

    answers()


@pytest.mark.parametrize(
    "text",
    [
        "\u05e9\u05dc\u05d5\u05dd \u200f\u05e2",
        "👩‍👩‍👧 🇯🇵 é",
        "<|endoftext|> </s> [INST]",
        "\u2028 \u200d",
        "x" * 10**6,
    ],
)
def test_unusual_text_is_read_unchanged(text: str, compose: Compose, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD | {"chosen": f" {text}"}, ensure_ascii=False) + "\n")
    data = to_run_config(compose([])).data
    (found,) = load_datasets(replace(data, source=Source.local, path=str(path)), seed=1)
    assert [record.chosen for record in found.train] == [f" {text}"]
