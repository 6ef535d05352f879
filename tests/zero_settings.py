"""The ZeRO settings of conf/zero, for tests that start engines without a composed config."""

from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from rlhf.options import ZeroConfig

BASE = Path(__file__).parents[1] / "conf" / "base" / "zero.yaml"


def zero_config(**changes: Any) -> ZeroConfig:
    """Those of zero=auto with ``changes``."""
    changes = {"auto": True, "stage": 1} | changes
    merged = OmegaConf.merge(OmegaConf.structured(ZeroConfig), OmegaConf.load(BASE), changes)
    return cast(ZeroConfig, OmegaConf.to_object(merged))
