"""A run that is killed inside its phases and resumed equals the run that never was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.killer import PATH
from tests.runs import ROOT, TINY_RUN, finished, launch, metrics

pytestmark = pytest.mark.slow

STEPS = ["sft.epochs=0.5", "reward.epochs=0.5", "ppo.steps=5", "checkpoint.every_steps=2"]
STEPS += ["ppo.eval_every=3", "ppo.sample_every=2", f"tracking.others=[{PATH}]"]
TWO_RANKS = ["hardware.ranks_per_node=2"]
# One run of each way to keep weights, masters, moments and averages; benchmarks/soak.py has all.
CASES = {
    "torch, bf16": ["hardware.dtype=bf16", "zero=stage2", "ppo.ema_beta=0.9", "ppo.kl_target=1"],
    "torch, fp32 and all options": [
        "zero=stage0",
        "ppo.scale_reward=running",
        "ppo.lr_guard_kl=0.01",
        "ppo.actor_dropout=0.1",
        "sft.eval_every=2",
        "ppo.actor_freeze_steps=3",
    ],
    "trunk": ["ppo.shared_trunk=true", "ppo.num_layers_unfrozen=1", "ppo.ema_beta=0.9"],
    "DeepSpeed, stage 0": ["zero=stage0", *TWO_RANKS],
    "DeepSpeed, stage 2, bf16": ["zero=stage2", *TWO_RANKS, "hardware.dtype=bf16"],
    "DeepSpeed, stage 3, averages": ["zero=stage3", *TWO_RANKS, "ppo.ema_beta=0.9"],
    "LoRA and DPO": ["lora=default", "phase=pipeline_dpo"],
}


@pytest.mark.parametrize("case", CASES)
def test_killed_run_equals_the_run_that_never_was(case: str, tmp_path: Path) -> None:
    overrides = [*STEPS, *CASES[case]]
    whole = finished(tmp_path / "whole", *overrides, PYTHONPATH=ROOT)
    phases = list(json.loads((whole / "result.json").read_text())["phases"])
    killed = tmp_path / "killed"
    words = [*TINY_RUN, *overrides, f"run_dir={killed}"]
    # Every phase once, the last phase in every case: it has the most kinds of state.
    for phase in phases if case == next(iter(CASES)) else phases[-1:]:
        run = launch(*words, cwd=tmp_path, PYTHONPATH=ROOT, KILL_AT=f"{phase}:4")
        assert run.returncode != 0, f"killed in {phase}"
        words = [f"resume={killed}"]
    run = launch(*words, cwd=tmp_path, PYTHONPATH=ROOT)
    assert run.returncode == 0, run.stderr
    assert f"{phases[-1]}: continues after step 2" in run.stdout
    assert_equal(killed, whole)


def assert_equal(one: Path, other: Path) -> None:
    """Check that two runs have the same metrics, samples, results and files of models."""
    assert metrics(one) == metrics(other)
    assert untimed(one) == untimed(other)
    assert files(one) == files(other), "and nothing else is left"
    for name in files(one):
        if name.endswith((".safetensors", "samples.jsonl", "alarms.jsonl")):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name


def untimed(run_dir: Path) -> dict[str, Any]:
    """The results of the phases, without times and memory."""
    result = json.loads((run_dir / "result.json").read_text())
    return {
        phase: {k: v for k, v in values.items() if k not in TIMES}
        for phase, values in result["phases"].items()
    }


TIMES: Sequence[str] = ("seconds", "peak_memory_gib", "planned", "measured")


def files(run_dir: Path) -> set[str]:
    """The files of a run."""
    return {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
