"""benchmarks/papers/loss_parity.py: what needs no wheel, and its page."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import ROOT

FIGURES = {0: {"TRL: DPO": [1e-9], "TRL: IPO": [0.9, 1e-12]}}


def test_judge(load: Any) -> None:
    judge = load("papers.loss_parity").judge
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
    sides = load("papers.parity_sides").Sides
    ours = {"value": torch.tensor(2.0), "gradient": torch.tensor([0.0, 1e-3])}
    theirs = {"value": torch.tensor(2.0), "gradient": torch.tensor([1e-4, 1e-3])}
    assert sides(theirs, ours).gap == pytest.approx(0.1)
    assert sides(ours, ours).gap == 0
    broken = {**theirs, "gradient": torch.tensor([torch.nan, 1e-3])}
    assert math.isnan(sides(broken, ours).gap)


def test_the_page_is_made_from_the_figures(load: Any) -> None:
    page = load("papers.loss_parity_page")
    assert page.PAGE.read_text() == page.parity_page(page.FIGURES)
    parity, wheels = load("papers.loss_parity"), load("papers.peer_wheels").Wheels()
    gaps = parity.largest_gaps(page.measured(page.FIGURES))
    assert gaps.keys() == parity.all_pairs(wheels).keys()


def test_the_losses_of_the_wheels_agree(load: Any, tmp_path: Path) -> None:
    """Only where the wheels have been downloaded."""
    folder = ROOT / "runs" / "papers" / "shared" / "wheels"
    peer_wheels, loss_parity = load("papers.peer_wheels"), load("papers.loss_parity")
    if not all(peer_wheels.Wheels(folder).file(peer) for peer in peer_wheels.VERSIONS):
        pytest.skip("no wheels: make papers ONLY=loss_parity downloads them")
    place = load("papers.claims").Place(tmp_path, folder.parent, is_quick=True)
    assert loss_parity.judge({0: loss_parity.measure(0, place)}).outcome == "passed"
