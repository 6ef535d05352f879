"""Which engine runs a model."""

from __future__ import annotations

from torch import nn

from rlhf.config.checks import BatchPlan
from rlhf.config.choices import Dtype, Moments, TrainingEngine
from rlhf.engine.deepspeed_engine import DeepSpeedEngine
from rlhf.engine.ds_config import Role
from rlhf.engine.settings import EngineSettings, OptimizerSettings
from rlhf.engine.torch_engine import TorchEngine
from rlhf.errors import CapabilityError
from rlhf.types import Ranks

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
    """The engine that zero.engine asks for; auto is torch where that can do all that is asked.

    Raises:
        CapabilityError: zero.engine=torch where it cannot, or zero.moments=bf16 elsewhere.
    """
    zero = settings.zero
    obstacle = _obstacle(settings, ranks)
    if zero.engine is TrainingEngine.torch and obstacle is not None:
        raise CapabilityError(
            "zero.engine=torch: it runs one rank without offloading, in bf16 or fp32, and "
            f"{obstacle}; use zero.engine=auto"
        )
    is_torch = zero.engine is not TrainingEngine.deepspeed and obstacle is None
    keeps_half_masters = is_torch and settings.dtype is Dtype.bf16 and zero.stage > 0
    if zero.moments is Moments.bf16 and not keeps_half_masters:
        raise CapabilityError(
            "zero.moments=bf16: only zero.engine=torch keeps such moments, in a bf16 run with "
            f"zero.stage=1 or more{f', and {obstacle}' if obstacle else ''}; use zero.moments=fp32"
        )
    engine = TorchEngine if is_torch else DeepSpeedEngine
    return engine(module, role=role, settings=settings, plan=plan, ranks=ranks, optimizer=optimizer)


def _obstacle(settings: EngineSettings, ranks: Ranks) -> str | None:
    """What of this run plain torch cannot do; None: nothing."""
    zero = settings.zero
    offloads = (
        zero.offload_optimizer
        or zero.offload_parameters
        or zero.offload_reference
        or zero.offload_reward
    )
    obstacles = {
        f"there are {ranks.size} ranks": ranks.size > 1,
        "hardware.dtype is fp16": settings.dtype is Dtype.fp16,
        "zero.offload_* is set": offloads,
        "zero.quantize_frozen_weights is set": zero.quantize_frozen_weights,
        "zero.extra is set": bool(zero.extra),
    }
    return next((text for text, stands in obstacles.items() if stands), None)
