"""The ZeRO settings of conf/zero, for tests that start engines without a composed config."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from rlhf.config.machine_schema import ZeroConfig

AUTO = Path(__file__).parents[1] / "conf" / "zero" / "auto.yaml"


def zero_config(**changes: Any) -> ZeroConfig:
    """Those of conf/zero/auto.yaml with ``changes``."""
    fields = {k: v for k, v in OmegaConf.load(AUTO).items() if k != "defaults"}
    merged = OmegaConf.merge(OmegaConf.structured(ZeroConfig), fields, changes)
    return cast(ZeroConfig, OmegaConf.to_object(merged))
