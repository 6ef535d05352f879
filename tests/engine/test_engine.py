"""The engine under every ZeRO stage, on several ranks: averages, rates, overflows, checkpoints."""

from pathlib import Path

import pytest

from tests.runs import TORCHRUN, python

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("stage", "offload", "ranks"),
    [
        *((0, "none", 2), (2, "offload", 3), (3, "none", 2)),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in [(0, "none", 3), (1, "none", 3), (3, "none", 3), (3, "offload", 2)]
        ),
    ],
)
def test_engine_keeps_its_promises(stage: int, offload: str, ranks: int, tmp_path: Path) -> None:
    launcher = (*TORCHRUN[:-1], f"--nproc-per-node={ranks}")
    run = python(*launcher, "-m", "tests.engine.engine_rank", stage, offload, tmp_path)
    assert run.returncode == 0, run.stderr
