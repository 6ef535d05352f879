"""On-policy distillation: a teacher grades each token of the policy's own responses.

With ``ppo.teacher_path`` the reference of the KL penalty is the teacher. With
``ppo.teacher_prompt_column`` the reference is also a teacher that reads another prompt, such as one
with the answer (OPSD, https://arxiv.org/abs/2601.18734); this takes one more pass of the reference
per rollout. Do not use such a column with a model that ignores hints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import ModelInit, Phase, Source
from rlhf.config.schema.keys import ABOVE_0, Names, key, needs
from rlhf.config.schema.model import ModelConfig
from rlhf.methods import Method, MethodKeys

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig
    from rlhf_lab.distillation.costs import TeacherCosts
    from rlhf_lab.distillation.hooks import DistillationHook

COLUMN = "ppo.teacher_prompt_column"


@dataclass(kw_only=True)
class DistillationKeys(MethodKeys):
    """Keys of the group ``ppo`` for teachers."""

    teacher_path: str | None = key(default=None, names=Names.place)
    """Model folder or hub id of a teacher, which is the reference of the KL penalty; null: none."""
    teacher_prompt_column: str | None = key(default=None, names=Names.column)
    """Column of the data with the prompt that a teacher reads, such as the prompt with a hint. The
    teacher has the reference's weights; the policy and the KL penalty read the plain prompt."""
    teacher_coef: float = key(
        ABOVE_0, default=1.0, unread=[needs("teacher_prompt_column", fix="add {key}=COLUMN")]
    )
    """Penalty per nat of KL(policy || teacher) of a token, after advantages are whitened."""

    @property
    def setting(self) -> str:
        """Return the setting KEY=VALUE that makes the reference a teacher; "" if there is none."""
        values = {"ppo.teacher_path": self.teacher_path, COLUMN: self.teacher_prompt_column}
        return next((f"{key}={value}" for key, value in values.items() if value is not None), "")


class Distillation(Method):
    """Let a teacher grade each token of the policy's own responses."""

    name = "distillation"
    keys = {"ppo": DistillationKeys}
    off = {"ppo.teacher_path": None, COLUMN: None}

    def check(self, config: RunConfig) -> None:
        """Check that the reference can be a teacher, and that generated data has the column."""
        keys = DistillationKeys.of(config)
        column = keys.teacher_prompt_column
        broken = {
            f"{keys.setting} with ppo.shared_trunk=true: the reference is part of the shared "
            "trunk, so it cannot be a teacher; set ppo.shared_trunk=false, or remove the teacher": (
                keys.setting != "" and config.ppo.shared_trunk
            ),
            f"{COLUMN}={column}: data=synthetic has no column {column}; its only column is "
            "answer": (column not in (None, "answer") and config.data.source is Source.synthetic),
        }
        if Phase.ppo in config.phase.order:
            refuse_broken_rule(broken)

    def reference(self, config: RunConfig, phase: Phase) -> tuple[str, ModelConfig] | None:
        """Return the model of ``ppo.teacher_path`` as PPO's reference."""
        path = DistillationKeys.of(config).teacher_path
        if phase is not Phase.ppo or path is None:
            return None
        return "ppo.teacher", replace(config.model, init=ModelInit.pretrained, path=path)

    def hook(self) -> type[DistillationHook]:
        """Return the class of the hook that penalises the policy's KL to the teacher."""
        from rlhf_lab.distillation.hooks import DistillationHook

        return DistillationHook

    def costs(self) -> TeacherCosts:
        """Return the costs of the second pass of the reference."""
        from rlhf_lab.distillation.costs import TeacherCosts

        return TeacherCosts()
