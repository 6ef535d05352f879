"""Compare the planner's memory with traced memory, for benchmarks/planner.md.

``python -m tests.pretend_cuda.memory`` traces: it runs this project's code on models of real size,
on a pretended GPU that computes shapes only, and writes ``traced_memory.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlhf.config.machine_rates import GIB
from rlhf.config.schema.run import RunConfig
from rlhf.plan.phase_plan import PhasePlan
from rlhf.plan.plan import plan_run
from tools.docs.pages import composed

TRACED = Path(__file__).with_name("traced_memory.json")
MOMENTS = {
    "sft": ("building", "between steps", "training"),
    "ppo": (
        "building",
        "between steps",
        "generation",
        "scoring",
        "training of the critic",
        "training of the actor",
    ),
}
COMMON = (
    "data.template=plain",
    "data=rm_static",
    "zero=stage1",
    "rollout.keep_graphs=never",  # the rollout frees its memory, so that the trace shows it
    "ppo.rollout_batch_size=64",
    "ppo.mini_batch_size=64",
    "ppo.ppo_epochs=1",
    "rollout.max_response_tokens=128",
)
AGAIN = ("model.gradient_checkpointing=true", "reward_model.gradient_checkpointing=true")


def _of(model: str, reward_model: str, hardware: str, *more: str) -> tuple[str, ...]:
    return (f"model={model}", f"model@reward_model={reward_model}", f"hardware={hardware}", *more)


# name: overrides
CONFIGURATIONS = {
    "OPT-125M": _of("opt_125m", "opt_125m", "a6000_48g"),
    "SmolLM2-135M, LoRA": _of("smollm2_135m", "smollm2_135m", "a6000_48g", "lora=all", *AGAIN),
    "OPT-1.3B": _of("opt_1.3b", "opt_350m", "a100_40g"),
    "OPT-1.3B, fp16": _of("opt_1.3b", "opt_350m", "a6000_48g", "hardware.dtype=fp16"),
    "OPT-6.7B, LoRA, recomputed": _of("opt_6.7b", "opt_350m", "a6000_48g", "lora=all", *AGAIN),
    "Llama-3.2-1B": _of("llama3.2_1b", "llama3.2_1b", "a100_80g"),
    "Llama-3.2-3B, LoRA, fp16": _of(
        "llama3.2_3b", "llama3.2_1b", "a6000_48g", "lora=all", "hardware.dtype=fp16"
    ),
    "Llama-3.1-8B, LoRA, recomputed": _of(
        "llama3.1_8b", "llama3.2_1b", "a100_40g", "lora=all", *AGAIN
    ),
    "Qwen3-0.6B, fp16": _of("qwen3_0.6b", "qwen3_0.6b", "a6000_48g", "hardware.dtype=fp16"),
    "Qwen3-1.7B, recomputed": _of("qwen3_1.7b", "qwen3_0.6b", "a100_80g", *AGAIN),
    "Qwen3-4B, LoRA, recomputed": _of("qwen3_4b", "qwen3_0.6b", "a6000_48g", "lora=all", *AGAIN),
}


class Moment(NamedTuple):
    """Planned and traced bytes at one moment, without those of a process that has no models."""

    phase: str
    name: str
    planned: int
    traced: int

    @property
    def ratio(self) -> float:
        """Return planned over traced bytes."""
        return self.planned / self.traced


def phase_config(conf: Path, name: str, phase: str, *sizes: str) -> RunConfig:
    """Return one phase of a configuration, with chosen ``sizes`` of micro-batches and rows."""
    return composed(conf, *CONFIGURATIONS[name], *COMMON, f"phase={phase}", *sizes)


def planned_bytes(plan: PhasePlan, moment: str) -> int:
    """Return the planned bytes of a moment without the process's own, which no trace has."""
    parts = plan.moments[moment]
    return parts.total() - parts["process"]


def moments(conf: Path, name: str) -> Iterator[Moment]:
    """Yield all moments of a configuration, planned with the sizes that were traced."""
    for phase, traced in json.loads(TRACED.read_text())[name].items():
        sizes = [f"{key}={value}" for key, value in traced["sizes"].items()]
        plan = plan_run(phase_config(conf, name, phase, *sizes)).phases[0]
        for moment in MOMENTS[phase]:
            found = traced["moments"][moment]
            yield Moment(phase, moment, planned_bytes(plan, moment), found)


def memory_rows(conf: Path) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table: GiB planned / traced, and the range of the ratios."""
    rows = []
    for name in CONFIGURATIONS:
        found = list(moments(conf, name))
        ratios = [each.ratio for each in found]
        cells = [f"{each.planned / GIB:.1f} / {each.traced / GIB:.1f}" for each in found]
        rows.append([name, *cells, f"{min(ratios):.2f} to {max(ratios):.2f}"])
    names = [f"{phase}: {moment}" for phase, some in MOMENTS.items() for moment in some]
    return ["model", *names, "ratios"], rows
