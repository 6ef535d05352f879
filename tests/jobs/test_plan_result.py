"""The plan as one JSON document: ``python launch.py ... plan=only --json``."""

import sys
from typing import Any

import pytest

import launch as app
from tests.documents import read_document

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def _launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch in this process, which keeps its own settings."""
    monkeypatch.setattr(app, "set_up_process", lambda: None)


def planned(
    words: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["launch.py", *words.split(), "--json"])
    assert app.launch() == code
    return read_document("plan", capsys.readouterr().out)


@pytest.mark.usefixtures("_launched")
def test_a_plan_that_does_not_fit_has_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words = "phase=sft model=opt_13b hardware=a100_40g zero=stage0 plan=only"
    plan = planned(words, 2, monkeypatch, capsys)
    assert list(plan["phases"]) == ["sft"]
    assert not plan["fits"]
    assert (plan["error"]["key"], plan["error"]["value"]) == ("plan", "only")
    assert plan["reason"] in plan["error"]["message"]


@pytest.mark.usefixtures("_launched")
def test_a_plan_that_fits_is_one_document(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    plan = planned("experiment=smoke plan=only", 0, monkeypatch, capsys)
    assert plan["fits"]
    assert plan["hours"] > 0


@pytest.mark.usefixtures("_launched")
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
    words: str, key: str, value: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    found = planned(words, 2, monkeypatch, capsys)["error"]
    assert (found["key"], found["value"]) == (key, value)
