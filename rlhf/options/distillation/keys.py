"""Keys of PPO for teachers."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import ABOVE_0, Unread, key

COLUMN = "ppo.teacher_prompt_column"
PLAIN = Unread(
    lambda ppo: ppo.teacher_prompt_column is None,
    "{group}.teacher_prompt_column=null names no prompt of a teacher",
    "add {group}.teacher_prompt_column=COLUMN",
)


@dataclass(kw_only=True)
class DistillationKeys:
    """Keys of the group ``ppo`` for teachers."""

    teacher_path: str | None = key(is_place=True)
    """Model folder or hub id of a teacher, which is the reference of the KL penalty; null: none."""
    teacher_prompt_column: str | None
    """Column of the data with the prompt that a teacher reads, such as the prompt with a hint. The
    teacher has the reference's weights; the policy and the KL penalty read the plain prompt."""
    teacher_coef: float = key(ABOVE_0, unread=[PLAIN])
    """Penalty per nat of KL(policy || teacher) of a token, after advantages are whitened."""

    @property
    def teacher_setting(self) -> str:
        """Return the key and value that make the reference a teacher; an empty text if none do."""
        values = {"ppo.teacher_path": self.teacher_path, COLUMN: self.teacher_prompt_column}
        return next((f"{k}={value}" for k, value in values.items() if value is not None), "")
