"""Each regression of tests/planted.jsonl can be planted, and its test exists."""

from __future__ import annotations

import pytest

from tests.planted import Fault, read_faults
from tests.runs import ROOT


@pytest.mark.parametrize("fault", read_faults(), ids=lambda fault: fault.path)
def test_a_regression_can_be_planted(fault: Fault) -> None:
    assert (ROOT / fault.path).read_text().count(fault.old) == 1
    path, _, name = fault.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()
