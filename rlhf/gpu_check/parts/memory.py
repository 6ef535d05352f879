"""Compare the peak memory of whole phases with the planner's figure, for three models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rlhf.gpu_check.rows import CheckSetting, Finding, Size, Task, checked_finding
from rlhf.gpu_check.runs import SHORT_RUN, WORDS, EndedRun, planned_gib, run_to_end

# Torch may use less than planned. cuBLAS workspaces and fragmentation may use more.
LEAST, MOST, SPARE = 0.7, 1.05, 0.06  # LEAST, MOST: shares of the plan; SPARE: GiB
FEW = (
    *SHORT_RUN,
    *("sft.batch_size=128", "sft.epochs=0.5", "reward.batch_size=64", "reward.epochs=0.3"),
    *("ppo.steps=2", "ppo.rollout_batch_size=64", "ppo.mini_batch_size=64"),
)
# Few and small batches, for tests in which a CPU replaces the GPU.
SMALL = (
    *("sft.epochs=0.1", "reward.epochs=0.1", "ppo.steps=1", "rollout.max_response_tokens=8"),
    *("sft.batch_size=32", "sft.micro_batch_size=32"),
    *("ppo.rollout_batch_size=16", "ppo.mini_batch_size=16"),
)
RANDOM = ("model.init=random", "model.path=null", "model.vocab_size=400")
# Adapters need a trained model, so the last run uses the model that the second run trained.
ADAPTERS = WORDS["adapters"]


class MeasuredRun(NamedTuple):
    """A run to measure: a name, and the overrides that choose its model and phases."""

    name: str
    words: tuple[str, ...]


def _tiny_model_overrides(layers: int) -> tuple[str, ...]:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": layers}
    architecture = (f"model.architecture.{name}={size}" for name, size in sizes.items())
    return ("model.vocab_size=400", *architecture, *SMALL)


SHAPES = {
    Size.tiny: (
        MeasuredRun("13 M weights, all phases", _tiny_model_overrides(4)),
        MeasuredRun(
            "25 M weights, SFT in fp32",
            (*_tiny_model_overrides(8), "phase=sft", "hardware.dtype=fp32"),
        ),
        MeasuredRun("25 M weights, adapters", (*SMALL, *ADAPTERS)),
    ),
    Size.full: (
        MeasuredRun("OPT-125M, all phases", ("model=opt_125m", *RANDOM)),
        MeasuredRun("OPT-350M, SFT", ("model=opt_350m", *RANDOM, "phase=sft")),
        MeasuredRun("OPT-350M, adapters", (*ADAPTERS,)),
    ),
}


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield a task for each phase of each run."""
    for number, shape in enumerate(SHAPES[setting.size], start=1):
        run_dir = setting.folder / f"shape_{number}"
        runs: list[EndedRun] = []
        phases = ["sft"] if "phase=sft" in shape.words else ["sft", "reward", "ppo"]
        for phase in phases:
            yield Task(
                f"{shape.name}: {phase}", partial(_compare_with_plan, runs, run_dir, shape, phase)
            )


def _compare_with_plan(
    runs: list[EndedRun], run_dir: Path, shape: MeasuredRun, phase: str
) -> Finding:
    """Compare a phase's peak memory with its plan; if ``runs`` is empty, start the run first."""
    words = [*FEW, *shape.words]
    if set(ADAPTERS) <= set(words):
        words.append(f"model.path={run_dir.with_name('shape_2') / 'sft' / 'model'}")
    if not runs:
        runs.append(run_to_end(run_dir, *words))
    ended = runs[0]
    measured = ended.result["phases"][phase]["measured"]["memory_gib"]
    planned = planned_gib(ended.run_dir, phase)
    return checked_finding(
        LEAST * planned - SPARE <= measured <= MOST * planned + SPARE,
        f"{measured:.3f} GiB; {measured / planned:.0%} of the plan",
        f"{LEAST:.0%} to {MOST:.0%} of {planned:.3f} GiB (± {SPARE} GiB)",
        measured_gib=measured,
        planned_gib=planned,
    )
