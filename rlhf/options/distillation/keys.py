"""Key of PPO that names the teacher."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class DistillationKeys:
    """Keys of the group ``ppo`` for the teacher."""

    teacher_path: str | None
    """Model folder or hub id of a teacher, which is the reference of the KL penalty; null: none."""
