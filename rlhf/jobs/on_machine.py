"""Put what this machine has into a configuration that is composed with hardware=auto."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from rlhf.base.errors import CapabilityError
from rlhf.config.choices import Device

AUTO = "auto"
CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class ThisMachine:
    """What hardware=auto stands for here."""

    profile: str
    """Option of the group ``hardware``."""
    reason: str
    """What was found, and why it is used."""
    found: dict[str, Any] = field(default_factory=dict)
    """Keys of the group that are found on this machine, and replace those of the profile."""

    @property
    def line(self) -> str:
        """Return the line that a run begins with."""
        return f"hardware={AUTO}: {self.reason}"


def is_auto() -> bool:
    """Return True if the job that runs was composed with hardware=auto."""
    return bool(HydraConfig.get().runtime.choices.get("hardware") == AUTO)


def on_machine(cfg: DictConfig, this_machine: Callable[[], ThisMachine]) -> DictConfig:
    """Put what ``this_machine`` has into the composed ``cfg``, if it has hardware=auto.

    Keys that the command or an experiment sets keep their values.

    Raises:
        CapabilityError: if hardware.device=cuda, and ``this_machine`` is a CPU.
    """
    if not is_auto():
        return cfg
    machine = this_machine()
    if machine.profile == CPU:
        if cfg.hardware.device == Device.cuda.value:
            raise CapabilityError(
                f"hardware.device=cuda with hardware=auto, which is {machine.reason}; to plan for "
                "another machine, name its profile, such as hardware=a100_40g"
            )
        return cfg
    asked = OverridesParser.create().parse_overrides(list(HydraConfig.get().overrides.task))
    typed = {each.key_or_group.removeprefix("hardware.") for each in asked}
    auto, profile = (
        dict(compose("config", [f"hardware={option}"]).hardware)
        for option in (AUTO, machine.profile)
    )
    for key, value in (profile | machine.found).items():
        if key not in typed and cfg.hardware[key] == auto[key]:
            cfg.hardware[key] = value
    return cfg
