"""Keys of the store of finished phases."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlhf.config.schema.keys import ABOVE_0, NO_PHASE, key


class Reuse(StrEnum):
    """Which runs reuse finished phases with equal inputs, from the store of phases."""

    sweep = "sweep"
    always = "always"
    never = "never"


@dataclass(kw_only=True)
class ReuseConfig:
    """The store of finished phases: runs whose SFT or reward phase have equal inputs share it."""

    phases: Reuse
    """sweep: jobs of a sweep take phases from the store; always: all runs; never: none."""
    max_gib: float = key(ABOVE_0)
    """Size of the store, GiB; above it the phases used least recently are removed."""


@dataclass(kw_only=True)
class ReuseGroup:
    """Group of the run."""

    reuse: ReuseConfig = key(affects=NO_PHASE)
