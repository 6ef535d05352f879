"""Hostile inputs at every door: three at each here, hundreds in ``make soak``."""

import time
from itertools import islice
from pathlib import Path

import pytest

from rlhf.base.errors import ConfigError
from tests.fuzz.case import FAULTS, Case, Verdict, judged
from tests.fuzz.doors import mixed
from tests.fuzz.foreign_runs import find_faults

CASES, SEED = 27, 34
ATTACKS = 60


@pytest.mark.slow
def test_no_hostile_input_is_a_fault(tmp_path: Path) -> None:
    found = {
        case.name: answer
        for case in islice(mixed(SEED, tmp_path), CASES)
        if (answer := judged(case))[0] in FAULTS
    }
    assert not found


def refuse() -> None:
    raise ConfigError("seed=x: must be a whole number")


def test_every_verdict_can_be_reached() -> None:
    assert judged(Case("refused", refuse)) == (Verdict.refused, "seed=x: must be a whole number")
    assert judged(Case("fine", lambda: None, must_refuse=False))[0] is Verdict.harmless
    assert judged(Case("accepted", lambda: None))[0] is Verdict.silent
    verdict, text = judged(Case("raises", lambda: 1 / 0))
    assert verdict is Verdict.traceback
    assert "ZeroDivisionError" in text
    assert judged(Case("sleeps", lambda: time.sleep(60)), seconds=0.5)[0] is Verdict.hang


@pytest.mark.slow
def test_a_run_of_an_attacker_reaches_nothing(tiny_run: Path, tmp_path: Path) -> None:
    found = list(find_faults(SEED, ATTACKS, tiny_run, tmp_path))
    assert len(found) == ATTACKS
    assert not [(case.name, text) for case, verdict, text in found if verdict in FAULTS]
    refused = sum(verdict is Verdict.refused for _, verdict, _ in found)
    assert refused > ATTACKS // 8, "the attacks reach the commands"
