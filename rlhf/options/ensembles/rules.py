"""Rules for the members of the reward model, and the steps in which further members learn."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.batches import examples_per_step
from rlhf.config.choices import Phase
from rlhf.config.roles import (
    SHARDED_WEIGHTS,
    Role,
    has_reward_model,
    reward_model_base,
    stage_of,
)
from rlhf.config.schema.run import RunConfig
from rlhf.options.ensembles.keys import MEMBERS_FILE, CombineName

if TYPE_CHECKING:
    from rlhf.models.language_model import Scorer
    from rlhf.models.sources import ModelSource
    from rlhf.options.ensembles.members import Ensemble


def check(config: RunConfig) -> None:
    """Check that a run with several members has a reward model, and does not shard its weights."""
    if config.reward.members == 1:
        return
    best, loss = config.checkpoint.best, config.reward.loss
    stages = {stage_of(role, config.zero) for role in (Role.reward_training, Role.reward)}
    broken = {
        ": this run has no reward model, only rules or a judge; set reward.members=1, or add "
        "rewards.model={kind: model}": not has_reward_model(config),
        f" with checkpoint.best={best}: the further members learn after the first, and no earlier "
        "step has all of them; set checkpoint.best=null": (best or "").startswith("reward/"),
        f" with reward.loss={loss} on single responses: members learn from pairs; set "
        "reward.members=1, or use reward.loss=end": config.reward.unpaired is not None,
        " with sharded weights (ZeRO stage 3): members start from hidden states of the first "
        "member's layers; use zero=stage2, or set reward.members=1": SHARDED_WEIGHTS in stages,
    }
    refuse_broken_rule(broken, f"reward.members={config.reward.members}")


def num_added_steps(config: RunConfig, phase: Phase, *, examples: int) -> int:
    """Return the number of optimizer steps of the further members; 0 unless ``phase`` is reward."""
    if phase is not Phase.reward:
        return 0
    return math.ceil(examples * config.reward.member_epochs / examples_per_step(config, phase))


def check_models(config: RunConfig, phases: Container[Phase]) -> None:
    """Raise an error if the reward model has too few layers, or its layers' names are unknown."""
    if Phase.reward not in phases:
        return
    from rlhf.models.language_model import Scorer  # imports torch
    from rlhf.options.ensembles.members import build_members
    from rlhf.phases.shared.model_checks import build_weightless_model

    key, base = reward_model_base(config)
    if scorer := build_weightless_model("AutoModelForSequenceClassification", key, base):
        build_members(Scorer(scorer), config.reward, seeds=())


def complete_reward_model(
    scorer: Scorer, source: ModelSource, keys: Mapping[str, Any]
) -> Scorer | Ensemble:
    """Return the reward model of a run with these ``keys``: ``scorer``, or an ensemble with it.

    An older run has no key for members. A folder with members needs the keys of an ensemble.
    """
    members = keys.get("reward.members", 1)
    if members == 1 and not (Path(source.path or "") / MEMBERS_FILE).is_file():
        return scorer
    from rlhf.options.ensembles.members import Combination, load_ensemble

    combination = Combination()
    if "reward.members" in keys:
        name = CombineName(keys["reward.combine"])
        combination = Combination(members, name, keys["reward.uncertainty_coef"])
    return load_ensemble(scorer, source, combination)
