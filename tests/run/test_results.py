"""Files of results: what is damaged is told, and a run that only compares goes on."""

from pathlib import Path

from rlhf.base.stored_files import PLAN
from rlhf.run.results import read_plan, record_attempt


def test_a_damaged_plan_is_told_and_not_used(tmp_path: Path) -> None:
    said: list[str] = []
    assert read_plan(tmp_path, said.append) is None
    assert said == []
    (tmp_path / PLAN).write_text("{")
    assert read_plan(tmp_path) is None
    assert read_plan(tmp_path, said.append) is None
    (warning,) = said
    assert warning.startswith("warning: ")
    assert PLAN.name in warning
    assert warning.endswith("The run continues without planned values")


def test_an_attempt_in_another_environment_says_what_differs(tmp_path: Path) -> None:
    first = {"torch": "2.13.0", "method sapo": "rlhf-sapo 1.0"}
    assert record_attempt(tmp_path, first) == []
    assert record_attempt(tmp_path, first) == []
    later = {"torch": "2.13.0", "method sapo": "rlhf-sapo 1.1"}
    assert record_attempt(tmp_path, later) == ["method sapo rlhf-sapo 1.1, before rlhf-sapo 1.0"]
    assert record_attempt(tmp_path, later) == []
