"""What every engine is told, and the parameter groups that follow from it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlhf.config.choices import Dtype, TrainingEngine
from rlhf.config.feature_checks import torch_obstacle
from rlhf.config.machine_schema import ZeroConfig
from rlhf.config.roles import Role
from rlhf.errors import CapabilityError
from rlhf.types import Schedule


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What all engines of a run have in common; ``dtype`` is resolved, never auto.

    ``hybrid_engine`` is DeepSpeed's section of that name, for the actor; None: there is none.

    Raises:
        CapabilityError: fp16 at stage 0, where nothing keeps the fp32 masters that it needs.
    """

    zero: ZeroConfig
    dtype: Dtype
    hybrid_engine: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Refuse what no optimiser here can do."""
        if self.dtype is Dtype.fp16 and 0 in (self.zero.stage, self.zero.critic_stage):
            raise CapabilityError(
                f"hardware.dtype=fp16 with zero.stage={self.zero.stage} and zero.critic_stage="
                f"{'null' if self.zero.critic_stage is None else self.zero.critic_stage}: fp16 "
                "needs the fp32 masters that DeepSpeed keeps from stage 1 on; use zero=stage1, "
                "which costs nothing on one rank, or hardware.dtype=fp32"
            )


def obstacle_to_torch(role: Role, settings: EngineSettings, *, ranks: int) -> str | None:
    """What plain torch cannot do of what this model is asked for, as key=value; None: nothing."""
    if settings.hybrid_engine is not None and role is Role.actor:
        return "rollout.backend=hybrid_engine"
    if settings.dtype is Dtype.fp16:
        return "hardware.dtype=fp16"
    return torch_obstacle(settings.zero, ranks=ranks)


def runs_on_torch(role: Role, settings: EngineSettings, *, ranks: int) -> bool:
    """Whether plain torch runs this model, and DeepSpeed has nothing to shard."""
    is_asked = settings.zero.engine is not TrainingEngine.deepspeed
    return is_asked and obstacle_to_torch(role, settings, ranks=ranks) is None


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW of one trained model; ``schedule`` gives shares of the peak ``lr``.

    ``adapter_lr`` is the peak of LoRA's adapters (None: ``lr``); with ``ema_beta`` above 0 a moving
    average of the weights is kept.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    adapter_lr: float | None = None
    ema_beta: float = 0.0
    max_grad_norm: float
    schedule: Schedule


def parameter_groups(module: nn.Module, optimizer: OptimizerSettings) -> list[dict[str, Any]]:
    """Matrices decay; biases and the weights of norms, which are vectors, do not."""
    groups: defaultdict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_adapter = "lora_" in name  # peft's name
            lr = optimizer.adapter_lr if is_adapter and optimizer.adapter_lr else optimizer.lr
            shape = getattr(parameter, "ds_shape", parameter.shape)  # of the whole, if sharded
            decay = optimizer.weight_decay if len(shape) > 1 else 0.0
            groups[lr, decay].append(parameter)
    return [
        {"params": parameters, "lr": lr, "weight_decay": decay}
        for (lr, decay), parameters in groups.items()
    ]
