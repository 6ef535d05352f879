"""The engine under every ZeRO stage, on two ranks: moving average, rates, overflows, offload."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.runs import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(0, "none"), (1, "none"), (2, "none"), (2, "offload"), (3, "none"), (3, "offload")],
)
def test_engine_keeps_its_promises(stage: int, offload: str) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(ROOT / "tests/engine/engine_rank.py", str(stage), offload),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
