"""Make the reward phase train all members."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

    from rlhf.data.collate import PairStep
    from rlhf.options.ensembles.trainer import EnsembleTrainer
    from rlhf.phases.shared.context import RunContext


def build_reward_trainer(
    context: RunContext, steps: list[PairStep], pairs: Dataset
) -> EnsembleTrainer:
    """Return the trainer of the first and of all further members."""
    from rlhf.options.ensembles.trainer import EnsembleTrainer  # imports the reward phase

    return EnsembleTrainer(context, steps, pairs)
