"""Make the reward phase train all members, check its model, and load trained members."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from rlhf.config.choices import Phase
from rlhf.config.roles import reward_model_base
from rlhf.config.schema.run import RunConfig
from rlhf.models.language_model import Scorer
from rlhf.models.sources import ModelSource
from rlhf.options.ensembles.keys import CombineName
from rlhf.options.ensembles.members import Combination, Ensemble, build_members, load_ensemble
from rlhf.phases.shared.model_checks import build_weightless_model

if TYPE_CHECKING:
    from datasets import Dataset

    from rlhf.data.collate import PairStep
    from rlhf.options.ensembles.trainer import EnsembleTrainer
    from rlhf.phases.shared.context import RunContext


def check_models(config: RunConfig, phases: Container[Phase]) -> None:
    """Raise an error if the reward model has too few layers, or its layers' names are unknown."""
    if Phase.reward not in phases:
        return
    key, base = reward_model_base(config)
    if scorer := build_weightless_model("AutoModelForSequenceClassification", key, base):
        build_members(Scorer(scorer), config.reward, seeds=())


def build_reward_trainer(
    context: RunContext, steps: list[PairStep], pairs: Dataset
) -> EnsembleTrainer:
    """Return the trainer of the first and of all further members."""
    from rlhf.options.ensembles.trainer import EnsembleTrainer  # imports the reward phase

    return EnsembleTrainer(context, steps, pairs)


def complete_reward_model(
    scorer: Scorer, source: ModelSource, keys: Mapping[str, Any]
) -> Scorer | Ensemble:
    """Return the reward model of a run with these ``keys``: ``scorer``, or an ensemble with it."""
    combination = Combination()
    if "reward.members" in keys:
        name = CombineName(keys["reward.combine"])
        coef = keys["reward.uncertainty_coef"]
        combination = Combination(keys["reward.members"], name, coef)
    return load_ensemble(scorer, source, combination)
