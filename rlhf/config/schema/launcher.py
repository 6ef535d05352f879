"""Schema of the config group ``launcher``."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import ABOVE_0, MINUTES, key


@dataclass(kw_only=True)
class LauncherConfig:
    """Settings for starting the ranks (docs/launching.md)."""

    dry_run: bool
    """Print the command that would start the ranks, then stop."""
    hostfile: str | None
    """File of nodes and slots for DeepSpeed; null: this node, or the SLURM job's nodes."""
    master_addr: str | None
    """Address of the first node; null: found automatically."""
    master_port: int = key(ABOVE_0)
    """Port on the first node where the ranks of several nodes meet."""
    watchdog_minutes: float | None = key(MINUTES)
    """Minutes without the end of a step after which a run is ended as stuck; null: never."""
    timeout_minutes: float = key(MINUTES)
    """Minutes that ranks wait for one another, including data preparation."""
