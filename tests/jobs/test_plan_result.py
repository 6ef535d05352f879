"""The plan as one JSON document: ``python launch.py ... plan=only --json``."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

import launch as app
from tests.documents import read_document

Planned = Callable[[str, int], dict[str, Any]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Planned:
    """Launch in this process, which keeps its own settings; return the document."""

    def launched(words: str, code: int) -> dict[str, Any]:
        monkeypatch.setattr(app, "set_up_process", lambda: None)
        monkeypatch.setattr(sys, "argv", ["launch.py", *words.split(), "--json"])
        assert app.start() == code
        return read_document("plan", capsys.readouterr().out)

    return launched


def test_a_plan_is_one_document(planned: Planned) -> None:
    plan = planned("experiment=smoke plan=only", 0)
    assert plan["fits"]
    assert plan["hours"] > 0
    plan = planned("phase=sft model=opt_13b hardware=a100_40g zero=stage0 plan=only", 2)
    assert list(plan["phases"]) == ["sft"]
    assert not plan["fits"]
    assert (plan["error"]["key"], plan["error"]["value"]) == ("plan", "only")
    assert plan["reason"] in plan["error"]["message"]


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("experiment=smoke", "--json", None),
        ("-m seed=1,2 plan=only", "--json", None),
        ("ppo.cliprang=0.1 plan=only", "ppo.cliprang", None),
        ("ppo.lam=1.5 plan=only", "ppo.lam", "1.5"),
    ],
)
def test_a_refusal_is_one_document(
    words: str, key: str, value: str | None, planned: Planned
) -> None:
    found = planned(words, 2)["error"]
    assert (found["key"], found["value"]) == (key, value)
