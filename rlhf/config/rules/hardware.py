"""Rules for the config group ``hardware``."""

from __future__ import annotations

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Device
from rlhf.config.schema.hardware import HardwareConfig


def check_hardware(hardware: HardwareConfig) -> None:
    """Check that all rates of a GPU are given: only rates of this machine's CPU can be measured."""
    for key in ("peak_tflops", "fp32_tflops", "memory_bandwidth_gb"):
        if hardware.device is Device.cuda and getattr(hardware, key) is None:
            raise ConfigError(
                f"hardware.{key}=null: only rates of a CPU are measured; give the GPU's figure, "
                "see conf/hardware/template.yaml"
            )
