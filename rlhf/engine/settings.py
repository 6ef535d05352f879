"""Settings of engines and optimizers, and the parameter groups that follow from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from rlhf.algorithms.schedule import build_lr_schedule
from rlhf.base.errors import CapabilityError
from rlhf.base.types import Schedule, WeightFollower
from rlhf.config.choices import Dtype, Phase
from rlhf.config.roles import Role, runs_on_torch, setting_unsupported_by_torch
from rlhf.config.schema.run import RunConfig
from rlhf.config.schema.supervised import OptimizerConfig
from rlhf.engine.masters import Masters
from rlhf.options import ZeroConfig


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings common to all engines of a run; ``dtype`` is resolved, never auto.

    ``actor_sections`` are further sections of the actor's DeepSpeed config. The key of each is the
    name of the rollout backend that needs the section.
    """

    zero: ZeroConfig
    dtype: Dtype
    actor_sections: Mapping[str, Any] = field(default_factory=dict)

    def setting_unsupported_by_torch(self, role: Role, *, ranks: int) -> str | None:
        """Return the first setting that plain torch does not support, as key=value, or None."""
        return setting_unsupported_by_torch(
            self.zero, ranks=ranks, dtype=self.dtype, needs_deepspeed=self._deepspeed_reason(role)
        )

    def runs_on_torch(self, role: Role, *, ranks: int) -> bool:
        """Return True if plain torch runs the model of ``role``."""
        return runs_on_torch(
            self.zero, ranks=ranks, dtype=self.dtype, needs_deepspeed=self._deepspeed_reason(role)
        )

    def _deepspeed_reason(self, role: Role) -> str | None:
        sections = self.actor_sections if role is Role.actor else {}
        return next((f"rollout.backend={name}" for name in sections), None)

    def __post_init__(self) -> None:
        """Raise CapabilityError for fp16 at stage 0: fp16 needs masters, and stage 0 has none."""
        if self.dtype is Dtype.fp16 and 0 in (self.zero.stage, self.zero.critic_stage):
            raise CapabilityError(
                f"hardware.dtype=fp16 with zero.stage={self.zero.stage} and zero.critic_stage="
                f"{'null' if self.zero.critic_stage is None else self.zero.critic_stage}: fp16 "
                "needs fp32 master weights, as from stage 1 on; use zero=stage1, "
                "which costs nothing on one rank, or hardware.dtype=fp32"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW settings of one trained model; ``schedule`` returns a step's share of the peak ``lr``.

    ``lr_of(name)`` returns the peak learning rate of a parameter, or None to use ``lr``.
    ``follow`` builds a follower of the trained weights, such as their average.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    lr_of: Callable[[str], float | None] = lambda _: None
    follow: Callable[[Masters], WeightFollower] | None = None
    max_grad_norm: float
    schedule: Schedule

    @classmethod
    def from_config(cls, config: OptimizerConfig, *, total_steps: int) -> OptimizerSettings:
        """Return settings with a schedule over ``total_steps`` optimizer steps."""
        return cls(
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            schedule=build_lr_schedule(
                config.lr_schedule.value,
                warmup_steps=config.warmup_steps,
                total_steps=total_steps,
                min_ratio=config.min_lr_ratio,
            ),
        )


def optimizer_settings(
    config: RunConfig,
    group: OptimizerConfig,
    phase: Phase,
    role: Role,
    *,
    total_steps: int,
) -> OptimizerSettings:
    """Return the optimizer settings of ``role``; ``group`` is the config group that holds them."""
    settings = OptimizerSettings.from_config(group, total_steps=total_steps)
    if (phase, role) == (Phase.ppo, Role.actor) and config.ppo.ema_beta > 0:
        from rlhf.options.average.moving_average import MovingAverage

        beta, on_host = config.ppo.ema_beta, config.zero.offload_ema
        settings = replace(settings, follow=partial(MovingAverage, beta=beta, on_host=on_host))
    if config.lora.rank > 0:
        from rlhf.options.lora.models import adapter_lr

        settings = replace(settings, lr_of=partial(adapter_lr, config.lora, role))
    return settings


def parameter_groups(module: nn.Module, optimizer: OptimizerSettings) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups; weight decay applies to matrices, not biases and norms."""
    groups: defaultdict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            lr = optimizer.lr_of(name) or optimizer.lr
            shape = getattr(parameter, "ds_shape", parameter.shape)  # full shape if sharded
            decay = optimizer.weight_decay if len(shape) > 1 else 0.0
            groups[lr, decay].append(parameter)
    return [
        {"params": parameters, "lr": lr, "weight_decay": decay}
        for (lr, decay), parameters in groups.items()
    ]
