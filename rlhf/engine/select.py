"""Select and build the engine that runs a model."""

from __future__ import annotations

from torch import nn

from rlhf.base.errors import CapabilityError
from rlhf.base.ranks import Ranks
from rlhf.config.batches import BatchPlan
from rlhf.config.choices import MomentsDtype, TrainingEngine
from rlhf.config.roles import Role, has_16_bit_weights, stage_of
from rlhf.engine.deepspeed_engine import DeepSpeedEngine
from rlhf.engine.settings import EngineSettings, OptimizerSettings
from rlhf.engine.torch_engine import TorchEngine

AnyEngine = DeepSpeedEngine | TorchEngine


def build_engine(
    module: nn.Module,
    *,
    role: Role,
    settings: EngineSettings,
    plan: BatchPlan,
    ranks: Ranks,
    optimizer: OptimizerSettings | None = None,
) -> AnyEngine:
    """Build the engine that zero.engine names; auto selects torch if it supports the settings."""
    zero = settings.zero
    obstacle = settings.setting_unsupported_by_torch(role, ranks=ranks.size)
    if zero.engine is TrainingEngine.torch and obstacle is not None:
        raise CapabilityError(
            f"zero.engine=torch with {obstacle}: only DeepSpeed supports this setting; "
            "use zero.engine=auto"
        )
    is_torch = settings.runs_on_torch(role, ranks=ranks.size)
    wants_bf16_moments = optimizer is not None and zero.moments is MomentsDtype.bf16
    if wants_bf16_moments and not (is_torch and has_16_bit_weights(role, zero, settings.dtype)):
        raise CapabilityError(
            f"zero.moments=bf16 with {obstacle or f'zero.engine={zero.engine}'} and hardware.dtype="
            f"{settings.dtype} in the {role} at stage {stage_of(role, zero)}: bf16 "
            "moments require zero.engine=torch, hardware.dtype=bf16 and stage 1 or higher; use "
            "zero.moments=fp32"
        )
    if is_torch:
        return TorchEngine(module, role=role, settings=settings, ranks=ranks, optimizer=optimizer)
    return DeepSpeedEngine(
        module, role=role, settings=settings, plan=plan, ranks=ranks, optimizer=optimizer
    )
