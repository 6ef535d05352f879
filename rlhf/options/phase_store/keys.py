"""Keys of the store of finished phases."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlhf.config.schema.keys import ABOVE_0, NO_PHASE, key, needs

Reuse = StrEnum("Reuse", "sweep always never")
"""Runs that take finished phases with equal inputs from the store of phases."""


@dataclass(kw_only=True)
class ReuseConfig:
    """Settings of the store of finished phases, from which runs with equal inputs reuse them."""

    phases: Reuse
    """sweep: jobs of a sweep take phases from the store; always: all runs; never: none."""
    max_gib: float = key(ABOVE_0, unread=[needs("phases", "sweep", "always")])
    """Size of the store, GiB; above it the phases used least recently are removed."""


@dataclass(kw_only=True)
class ReuseGroup:
    """The group ``reuse`` of a run."""

    reuse: ReuseConfig = key(affects=NO_PHASE)
