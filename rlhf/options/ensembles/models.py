"""Plug the members into the checks of models, and into reward models that are loaded."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from rlhf.config.choices import Phase
from rlhf.config.roles import reward_model_base
from rlhf.config.schema.run import RunConfig
from rlhf.models.language_model import Scorer
from rlhf.models.sources import ModelSource
from rlhf.options.ensembles.keys import CombineName
from rlhf.options.ensembles.members import Combination, Ensemble, grow_members, load_ensemble
from rlhf.phases.shared.model_checks import build_empty


def check_models(config: RunConfig, phases: Container[Phase]) -> None:
    """Raise an error if the reward model has too few layers, or unknown ones, for its members."""
    if Phase.reward not in phases:
        return
    key, base = reward_model_base(config)
    if scorer := build_empty("AutoModelForSequenceClassification", key, base):
        grow_members(Scorer(scorer), config.reward, seeds=())


def complete_reward_model(
    scorer: Scorer, source: ModelSource, keys: Mapping[str, Any]
) -> Scorer | Ensemble:
    """Return the reward model of a run with these ``keys``; without reward.members: one member."""
    combination = Combination()
    if "reward.members" in keys:
        name = CombineName(keys["reward.combine"])
        coef = keys["reward.uncertainty_coef"]
        combination = Combination(keys["reward.members"], name, coef)
    return load_ensemble(scorer, source, combination)
