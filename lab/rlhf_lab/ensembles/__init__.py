"""Several reward models, whose scores are combined into one score.

The members share their lower layers. Use several members if the policy exploits one reward model: a
response on which the members disagree gets a lower score (https://arxiv.org/abs/2310.02743), or the
reward model gets the mean of their weights (WARM, https://arxiv.org/abs/2401.12187).
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum
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
from rlhf.config.schema.keys import (
    ABOVE_0,
    AT_LEAST_0,
    ONLY_PPO,
    Unread,
    always_affects,
    key,
    needs,
)
from rlhf.methods import Method, MethodKeys

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig
    from rlhf_lab.ensembles.costs import EnsembleCosts
    from rlhf_lab.ensembles.members import EnsembleCompletion
    from rlhf_lab.ensembles.trainer import EnsembleTrainer

OWN_SHARE = 4  # by default, a further member has its own copy of 1 / OWN_SHARE of all layers
SEVERAL = [Unread(("members",), lambda members: members == 1, "add {key}=5")]
WEIGHTED = [needs("combine", "uncertainty")]


class CombineName(StrEnum):
    """Ways to combine the members' scores to one score; warm averages their weights instead."""

    mean = "mean"
    worst = "worst"
    uncertainty = "uncertainty"
    warm = "warm"


def combining_phases(config: Any) -> frozenset[Phase]:
    """Return the phases whose results reward.combine changes: PPO, and with warm also reward."""
    trains = {Phase.reward} if config.reward.combine is CombineName.warm else set()
    return frozenset({Phase.ppo, *trains})


@dataclass(kw_only=True)
class EnsembleKeys(MethodKeys):
    """Keys of the group ``reward`` for an ensemble of reward models."""

    members: int = key(
        ABOVE_0, default=1, affects=always_affects(Phase.reward, Phase.ppo), is_inherited=True
    )
    """Reward models of the ensemble: the first is trained whole, the others on its layers."""
    member_layers: int | None = key(
        ABOVE_0,
        default=None,
        affects=always_affects(Phase.reward, Phase.ppo),
        is_inherited=True,
        unread=SEVERAL,
    )
    """Top layers that each further member has as its own; null: a quarter of all, at least one."""
    member_epochs: float = key(ABOVE_0, default=0.5, unread=SEVERAL)
    """Passes over the pairs in which the further members learn, after those of the first."""
    reweight_pairs: bool = key(default=True, unread=SEVERAL)
    """Each further member draws its own weight of each pair in its loss (Bayesian bootstrap)."""
    combine: CombineName = key(
        default=CombineName.mean, affects=combining_phases, is_inherited=False, unread=SEVERAL
    )
    """Score of a response: mean, worst or uncertainty (mean minus variance) of the members'
    scores; warm: the score of one model with the mean of the members' weights."""
    uncertainty_coef: float = key(
        AT_LEAST_0, default=0.1, affects=ONLY_PPO, is_inherited=False, unread=WEIGHTED
    )
    """Factor of the variance over the members, for combine=uncertainty."""

    def num_own_layers(self, total: int) -> int:
        """Return how many of a model's ``total`` layers a further member copies and trains."""
        return self.member_layers or max(1, total // OWN_SHARE)


class Ensembles(Method):
    """Train several reward models, and combine their scores to one score."""

    name = "ensembles"
    keys = {"reward": EnsembleKeys}
    off = {"reward.members": 1}

    def check(self, config: RunConfig) -> None:
        """Check that a run with several members has a reward model with unsharded weights."""
        members, lora = EnsembleKeys.of(config).members, config.lora
        if members == 1:
            return
        best, loss = config.checkpoint.best, config.reward.loss
        stages = {stage_of(role, config.zero) for role in (Role.reward_training, Role.reward)}
        broken = {
            " with adapters on the reward model: each member trains its own top layers, and the "
            "layers below are frozen; remove reward from lora.roles, or set reward.members=1": (
                lora.rank > 0 and "reward" in lora.roles
            ),
            ": this run has no reward model, only rules or a judge; set reward.members=1, or add "
            "rewards.model={kind: model}": not has_reward_model(config),
            f" with checkpoint.best={best}: the other members are trained after the first, so "
            "earlier checkpoints lack them; set checkpoint.best=null": (
                (best or "").startswith("reward/")
            ),
            f" with reward.loss={loss} on single responses: members learn from pairs; set "
            "reward.members=1, or use reward.loss=end": config.reward.unpaired is not None,
            " with sharded weights (ZeRO stage 3): members start from hidden states of the first "
            "member's layers; use zero=stage2, or set reward.members=1": SHARDED_WEIGHTS in stages,
        }
        refuse_broken_rule(broken, f"reward.members={members}")

    def check_models(self, config: RunConfig, phases: Container[Phase]) -> None:
        """Raise an error if the reward model has too few layers, or layers with unknown names."""
        if Phase.reward not in phases:
            return
        from rlhf.models.language_model import Scorer  # imports torch
        from rlhf.phases.shared.model_checks import build_weightless_model
        from rlhf_lab.ensembles.members import build_members

        group, base = reward_model_base(config)
        if scorer := build_weightless_model("AutoModelForSequenceClassification", group, base):
            build_members(Scorer(scorer), EnsembleKeys.of(config), seeds=())

    def num_added_steps(self, config: RunConfig, phase: Phase, *, examples: int) -> int:
        """Return the number of optimizer steps of the further members."""
        if phase is not Phase.reward:
            return 0
        epochs = EnsembleKeys.of(config).member_epochs
        return math.ceil(examples * epochs / examples_per_step(config, phase))

    def reward_trainer(self) -> type[EnsembleTrainer]:
        """Return the class that trains the first member, and then all further members."""
        from rlhf_lab.ensembles.trainer import EnsembleTrainer

        return EnsembleTrainer

    def reward_model(self) -> EnsembleCompletion:
        """Return the completion that adds the further members to a trained reward model."""
        from rlhf_lab.ensembles.members import EnsembleCompletion

        return EnsembleCompletion()

    def costs(self) -> EnsembleCosts:
        """Return the costs of the further members."""
        from rlhf_lab.ensembles.costs import EnsembleCosts

        return EnsembleCosts()
