"""benchmarks/papers/loss_parity.py: what needs no wheel, and its page."""

from __future__ import annotations

import importlib
import math
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
FIGURES = {0: {"TRL: DPO": [1e-9], "TRL: IPO": [0.9, 1e-12]}}
SOURCE = """
import not_installed
import math
from .beside import scale

LIMIT = 2.0


@not_installed.register("loss")
class Loss(not_installed.Base):
    @not_installed.profile
    def value(self, x: not_installed.Tensor) -> float:
        return min(math.exp(x) * scale, self.most)


def double(x: not_installed.Tensor) -> float:
    return LIMIT * x
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of ``benchmarks/papers`` as ``python -m papers`` does."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return lambda name: importlib.import_module(f"papers.{name}")


def test_functions_of_a_wheel_run_without_its_dependencies(load: Any, tmp_path: Path) -> None:
    peer_wheels = load("peer_wheels")
    name = f"trl-{peer_wheels.VERSIONS['TRL']}-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("trl/losses.py", SOURCE)
    wheels = peer_wheels.Wheels(tmp_path)
    found = wheels.load("TRL", "trl/losses.py", "Loss.value double", {"scale": 3.0})
    assert found.double(4.0) == 8.0
    trainer = type("Trainer", (), {"most": 5.0})()
    assert (found.value(trainer, 0.0), found.value(trainer, 9.0)) == (3.0, 5.0)
    with pytest.raises(LookupError, match=r"not defined: Loss\.other"):
        wheels.load("TRL", "trl/losses.py", "Loss.other double")


def test_without_a_wheel_and_without_a_network_the_row_is_refused(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(SystemExit) as stopped:
        load("peer_wheels").Wheels.fetch(tmp_path)
    assert stopped.value.code == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith(f"trl=={load('peer_wheels').VERSIONS['TRL']}: ")
    assert str(tmp_path) in message


def test_judge(load: Any) -> None:
    judge = load("loss_parity").judge
    assert judge(FIGURES).outcome == "passed"
    for gaps, word in (
        ({"TRL: DPO": [1e-5]}, "unexplained: TRL: DPO"),
        ({"TRL: DPO": [float("nan")]}, "unexplained: TRL: DPO"),
        ({"TRL: IPO": [0.9, 1e-5]}, "unexplained: TRL: IPO"),
    ):
        verdict = judge({**FIGURES, 1: {**FIGURES[0], **gaps}})
        assert (verdict.outcome, word in verdict.found) == ("failed", True), verdict
    without = judge({0: {**FIGURES[0], "TRL: IPO": [1e-12, 1e-12]}})
    assert without.outcome == "failed"
    assert "the named difference makes none: TRL: IPO" in without.found


def test_a_gap_is_a_share_of_the_largest_element(load: Any) -> None:
    sides = load("parity_sides").Sides
    ours = {"value": torch.tensor(2.0), "gradient": torch.tensor([0.0, 1e-3])}
    theirs = {"value": torch.tensor(2.0), "gradient": torch.tensor([1e-4, 1e-3])}
    assert sides(theirs, ours).gap == pytest.approx(0.1)
    assert sides(ours, ours).gap == 0
    broken = {**theirs, "gradient": torch.tensor([torch.nan, 1e-3])}
    assert math.isnan(sides(broken, ours).gap)


def test_the_page_is_made_from_the_figures(load: Any) -> None:
    page = load("loss_parity_page")
    assert page.PAGE.read_text() == page.parity_page(page.FIGURES)
    gaps = load("loss_parity").largest_gaps(page.measured(page.FIGURES))
    assert gaps.keys() == load("loss_parity").all_pairs(load("peer_wheels").Wheels()).keys()


def test_the_losses_of_the_wheels_agree(load: Any, tmp_path: Path) -> None:
    """Only where the wheels have been downloaded."""
    folder = ROOT / "runs" / "papers" / "shared" / "wheels"
    peer_wheels, loss_parity = load("peer_wheels"), load("loss_parity")
    if not all(peer_wheels.Wheels(folder).file(peer) for peer in peer_wheels.VERSIONS):
        pytest.skip("no wheels: make papers ONLY=loss_parity downloads them")
    place = load("claims").Place(tmp_path, folder.parent, is_quick=True)
    assert loss_parity.judge({0: loss_parity.measure(0, place)}).outcome == "passed"
