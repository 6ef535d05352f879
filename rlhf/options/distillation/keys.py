"""Keys of PPO for teachers."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import ABOVE_0, key, needs

COLUMN = "ppo.teacher_prompt_column"


@dataclass(kw_only=True)
class DistillationKeys:
    """Keys of the group ``ppo`` for teachers."""

    teacher_path: str | None = key(is_place=True)
    """Model folder or hub id of a teacher, which is the reference of the KL penalty; null: none."""
    teacher_prompt_column: str | None
    """Column of the data with the prompt that a teacher reads, such as the prompt with a hint. The
    teacher has the reference's weights; the policy and the KL penalty read the plain prompt."""
    teacher_coef: float = key(
        ABOVE_0, unread=[needs("teacher_prompt_column", fix="add {key}=COLUMN")]
    )
    """Penalty per nat of KL(policy || teacher) of a token, after advantages are whitened."""

    @property
    def teacher_setting(self) -> str:
        """Return the key and value that make the reference a teacher; an empty text if none do."""
        values = {"ppo.teacher_path": self.teacher_path, COLUMN: self.teacher_prompt_column}
        return next((f"{k}={value}" for k, value in values.items() if value is not None), "")
