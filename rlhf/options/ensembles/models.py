"""Plug the members into the checks of models."""

from __future__ import annotations

from collections.abc import Container

from rlhf.config.choices import Phase
from rlhf.config.roles import reward_model_base
from rlhf.config.schema.run import RunConfig
from rlhf.models.language_model import Scorer
from rlhf.options.ensembles.members import grow_members
from rlhf.phases.shared.model_checks import build_empty


def check_models(config: RunConfig, phases: Container[Phase]) -> None:
    """Raise an error if the reward model has too few layers, or unknown ones, for its members."""
    if Phase.reward not in phases:
        return
    key, base = reward_model_base(config)
    if scorer := build_empty("AutoModelForSequenceClassification", key, base):
        grow_members(Scorer(scorer), config.reward, seeds=())
