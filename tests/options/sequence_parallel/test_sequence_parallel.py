"""SFT on two ranks that share each sequence takes the steps of one rank."""

from pathlib import Path

import pytest

from rlhf.export import build_run_context
from rlhf.phases.shared.supervised import data_parallel_ranks
from tests.runs import finished, metrics

pytestmark = pytest.mark.slow

SHARED = [
    "phase=sft",
    "zero=stage3",
    "zero.param_persistence_threshold=0",
    "hardware.ranks_per_node=2",
    "zero.sequence_parallel_size=2",
    "sft.micro_batch_size=8",
    "model.gradient_checkpointing=true",
]
MEASURED = ("sft/loss", "sft/grad_norm", "sft/eval_loss")


def curve(run_dir: Path) -> list[float]:
    return [line[name] for line in metrics(run_dir) for name in MEASURED if name in line]


def test_two_ranks_take_the_steps_of_one(tiny_run: Path, tmp_path: Path) -> None:
    shared = finished(tmp_path / "shared", *SHARED)
    expected = curve(tiny_run)
    assert len(expected) > 4, "steps, and held-out examples before and after"
    assert curve(shared) == pytest.approx(expected, rel=2e-5, abs=1e-5)
    context = build_run_context(shared)
    assert data_parallel_ranks(context).size == 1, "one process reads the finished run"
