"""Each regression of tests/planted.jsonl can be planted, and its test exists."""

from tests.planted import read_faults
from tests.runs import ROOT


def test_every_regression_can_be_planted() -> None:
    for fault in read_faults():
        assert (ROOT / fault.path).read_text().count(fault.old) == 1, fault.path
        path, _, name = fault.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), fault.test
