"""Resolve hardware=auto: this machine's GPUs if torch can use them, otherwise its CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from rlhf.base.errors import CapabilityError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import Device, Dtype
from rlhf.config.hydra_parts import parse_overrides
from rlhf.config.machine_rates import GIB

AUTO = "auto"
CPU = "cpu"
# Files of GPU drivers. If none exists, there is no GPU, and torch need not be imported.
SIGNS = tuple(Path(name) for name in ("/proc/driver/nvidia/version", "/dev/dxg", "/dev/kfd"))
CARDS: Mapping[str, str] = read_yaml_beside(__file__, "cards.yaml")
GUESSED = "template"  # profile of a card that CARDS does not name
MIG = " MIG "  # in the name of a part of a card, such as "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
WHOLE_NODE = 8  # GPUs of a whole node; cards in NODES have a profile for it, such as 8xa100_40g
NODES = {"a100_40g", "a100_80g", "b200_180g", "h100_80g", "h200_141g", "l40s_48g"}


@dataclass(frozen=True, kw_only=True)
class ThisMachine:
    """The hardware profile that hardware=auto selects on this machine."""

    profile: str
    """Name of an option of the configuration group ``hardware``."""
    reason: str
    """The hardware that was found, and why it is used."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about this machine, by key of the group; they replace the profile's values."""

    @property
    def choice_line(self) -> str:
        """Return the line that a run prints first: hardware=auto and the reason."""
        return f"hardware={AUTO}: {self.reason}"


def is_hardware_auto() -> bool:
    """Return True if Hydra composed the current job with hardware=auto."""
    return bool(HydraConfig.get().runtime.choices.get("hardware") == AUTO)


def apply_auto_hardware(cfg: DictConfig, find_hardware: Callable[[], ThisMachine]) -> DictConfig:
    """With hardware=auto, write the profile of ``find_hardware()`` to ``cfg``; return ``cfg``.

    Keys that the command or an experiment sets keep their values.

    Raises:
        CapabilityError: if hardware.device=cuda, and the machine has no GPU that torch can use.
    """
    if not is_hardware_auto():
        return cfg
    machine = find_hardware()
    if machine.profile == CPU:
        if cfg.hardware.device == Device.cuda.value:
            raise CapabilityError(
                f"hardware.device=cuda with hardware=auto, which is {machine.reason}; to plan for "
                "another machine, name its profile, such as hardware=a100_40g"
            )
        return cfg
    overrides = parse_overrides(HydraConfig.get().overrides.task)
    typed = {each.key_or_group.removeprefix("hardware.") for each in overrides}
    auto = dict(compose(f"hardware/{AUTO}").hardware)
    profile = dict(compose(f"hardware/{machine.profile}").hardware)
    for key, value in (profile | machine.facts).items():
        if key not in typed and cfg.hardware[key] == auto[key]:
            cfg.hardware[key] = value
    return cfg


@cache  # cached, because every job of a sweep calls this function
def find_hardware(signs: Sequence[Path] = SIGNS) -> ThisMachine:
    """Return this machine's profile; if no file in ``signs`` exists, assume that it has no GPU."""
    if not any(sign.exists() for sign in signs):
        return ThisMachine(profile=CPU, reason="this machine's CPU, as it has no GPU")
    import torch

    from rlhf.engine.devices import check_gpus, resolve_dtype

    try:
        check_gpus(1)
    except CapabilityError as error:
        why = str(error).partition(": ")[2]
        reason = f"this machine's CPU, although it has a GPU: {why}"
        return ThisMachine(profile=CPU, reason=reason)
    count, card = torch.cuda.device_count(), torch.cuda.get_device_name()
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    dtype = resolve_dtype(Dtype.auto, Device.cuda)
    profile = next((name for key, name in CARDS.items() if re.search(key, card)), GUESSED)
    rates = f"rates of {profile}"
    if profile == GUESSED:
        rates += " (this card has no profile: planned times are a guess)"
    elif MIG in card:
        rates += " for the whole card (this part of it is slower than planned)"
    reason = f"{count} x {card}, {memory:.1f} GiB, {dtype}; {rates}"
    facts = {
        "ranks_per_node": count,
        "memory_gib": round(memory - 0.05, 1),  # rounded down
        "dtype": dtype.value,
        "host_memory_gib": None,
        "name": f"{count} x {card}",
    }
    if count == WHOLE_NODE and profile in NODES:
        profile = f"8x{profile}"
    elif count > 1:
        facts["price_per_hour"] = None  # the profile has the price of one GPU only
    return ThisMachine(profile=profile, reason=reason, facts=facts)
