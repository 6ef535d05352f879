"""Methods that a run can do without: one folder each, and this table of all of them.

A folder has, as far as its option needs them, these modules; each plugs into one seam of the core
(``rlhf/base/seams.py`` has their interfaces). The core names no option: it asks this table for the
modules of a seam. ``keys`` and ``rules`` are imported for every configuration, and import no torch;
the other modules only if the configuration switches their option on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig


class Option(NamedTuple):
    """An option: its folder, and the keys that switch it on."""

    name: str
    is_on: Callable[[RunConfig], bool]

    def module(self, seam: str) -> ModuleType | None:
        """Return the option's module for ``seam``; None if it does not plug into this seam."""
        name = f"{__name__}.{self.name}.{seam}"
        return import_module(name) if find_spec(name) else None


OPTIONS = (
    Option("environments", lambda config: config.environment.is_used),
    Option("ahead", lambda config: config.rollout.lag > 0),
    Option("resampling", lambda config: config.ppo.resampling_rounds > 0),
    Option("corrections", lambda config: config.ppo.rollout_correction != "none"),
    Option(
        "branches",
        lambda config: config.ppo.value_targets != "gae" or config.ppo.critic_check.every > 0,
    ),
    Option("ptx", lambda config: config.ppo.ptx_coef > 0),
    Option("average", lambda config: config.ppo.ema_beta > 0),
    Option("distillation", lambda config: config.ppo.teacher_path is not None),
    Option("trunk", lambda config: config.ppo.shared_trunk),
    Option("lora", lambda config: config.lora.rank > 0),
    Option("ensembles", lambda config: config.reward.members > 1),
    Option("sequence_parallel", lambda config: config.zero.sequence_parallel_size > 1),
    Option("hybrid_engine", lambda config: config.rollout.backend == "hybrid_engine"),
    Option("vllm", lambda config: config.rollout.backend == "vllm_server"),
    Option("phase_store", lambda config: config.reuse.phases != "never"),
    Option("cpu_kernels", lambda config: config.hardware.device == "cpu"),
    Option("gpu_kernels", lambda config: config.hardware.device == "cuda"),
)


def modules_of(seam: str, config: RunConfig | None = None) -> Iterator[ModuleType]:
    """Yield the modules for ``seam`` of the options that ``config`` switches on; None: of all."""
    for option in OPTIONS:
        if config is None or option.is_on(config):
            module = option.module(seam)
            if module is not None:
                yield module
