"""Odd fields of config.json: forty models here, hundreds in ``make soak``."""

from itertools import islice
from pathlib import Path

import pytest

from tests.fuzz import model_fields
from tests.fuzz.case import FAULTS, judged
from tests.fuzz.doors import mixed

CASES, SEED = 40, 20


@pytest.mark.slow
def test_odd_fields_give_right_probabilities_or_a_refusal(tmp_path: Path) -> None:
    found = {
        case.name: answer
        for case in islice(mixed(SEED, tmp_path, {"model fields": model_fields.cases}), CASES)
        if (answer := judged(case))[0] in FAULTS
    }
    assert not found
