"""The engine under every ZeRO stage, on two ranks: moving average, rates, overflows, offload."""

from __future__ import annotations

import pytest

from tests.runs import TORCHRUN, python

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        *((0, "none"), (2, "offload"), (3, "none")),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in [(1, "none"), (3, "offload")]),
    ],
)
def test_engine_keeps_its_promises(stage: int, offload: str) -> None:
    run = python(*TORCHRUN, "-m", "tests.engine.engine_rank", stage, offload)
    assert run.returncode == 0, run.stderr
