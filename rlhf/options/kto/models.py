"""Make the dpo phase train with KTO."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.options.kto.kto_trainer import KtoTrainer
    from rlhf.phases.shared.context import RunContext


def build_dpo_trainer(context: RunContext, total_steps: int) -> KtoTrainer:
    """Return the trainer that learns from marks."""
    from rlhf.options.kto.kto_trainer import KtoTrainer  # imports the dpo phase

    return KtoTrainer(context, total_steps=total_steps)
