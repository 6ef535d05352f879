"""Settings of engines and optimizers, for tests that start engines without a composed config."""

from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from rlhf.algorithms.schedule import build_lr_schedule
from rlhf.engine.settings import OptimizerSettings
from rlhf.options import ZeroConfig

BASE = Path(__file__).parents[1] / "conf" / "base" / "zero.yaml"
CONSTANT = build_lr_schedule("constant", warmup_steps=0, total_steps=1, min_ratio=1.0)


def zero_config(**changes: Any) -> ZeroConfig:
    """Those of zero=auto with ``changes``."""
    changes = {"auto": True, "stage": 1} | changes
    merged = OmegaConf.merge(OmegaConf.structured(ZeroConfig), OmegaConf.load(BASE), changes)
    return cast(ZeroConfig, OmegaConf.to_object(merged))


def adamw(**changes: Any) -> OptimizerSettings:
    """AdamW at a constant rate of 0.1 without decay, clipped at a norm of 1, with ``changes``."""
    plain = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    return OptimizerSettings(**{**plain, "max_grad_norm": 1.0, "schedule": CONSTANT} | changes)
