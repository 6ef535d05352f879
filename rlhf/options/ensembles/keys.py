"""Keys of the reward model's members, and of the score that they make together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlhf.base.seams import MeasureNames
from rlhf.config.choices import Phase
from rlhf.config.schema.keys import ABOVE_0, AT_LEAST_0, Unread, key, results_of

SHARED_LAYERS = 4  # a member has one of so many layers as its own, the others are shared


MEASURES = MeasureNames(evaluated=["disagreement"])


class CombineName(StrEnum):
    """Ways to make one score of the members of a reward model; warm averages their weights."""

    mean = "mean"
    worst = "worst"
    uncertainty = "uncertainty"
    warm = "warm"


def phases_that_combine(config: Any) -> frozenset[Phase]:
    """Return the phases that read reward.combine: training only distinguishes warm."""
    trains = {Phase.reward} if config.reward.combine is CombineName.warm else set()
    return frozenset({Phase.ppo, *trains})


SINGLE = (
    Unread(
        lambda reward: reward.members == 1,
        "{group}.members=1 trains a single model",
        "add {group}.members=5",
    ),
)
UNWEIGHTED = (
    Unread(
        lambda reward: reward.combine is not CombineName.uncertainty,
        "{group}.combine does not weigh the variance",
        "add {group}.combine=uncertainty",
    ),
)


@dataclass(kw_only=True)
class EnsembleKeys:
    """Part of the group ``reward``."""

    members: int = key(ABOVE_0, affects=results_of(Phase.reward, Phase.ppo), is_inherited=True)
    """Reward models of the ensemble: the first is trained whole, the others on its layers."""
    member_layers: int | None = key(
        ABOVE_0, affects=results_of(Phase.reward, Phase.ppo), is_inherited=True, unread=SINGLE
    )
    """Top layers that each further member has as its own; null: a quarter of all, at least one."""
    member_epochs: float = key(ABOVE_0, unread=SINGLE)
    """Passes over the pairs in which the further members learn, after those of the first."""
    reweight_pairs: bool = key(unread=SINGLE)
    """Each further member draws its own weight of each pair in its loss (Bayesian bootstrap)."""
    combine: CombineName = key(affects=phases_that_combine, is_inherited=False, unread=SINGLE)
    """Score of a response: mean, worst or uncertainty (mean minus variance) of the members'
    scores; warm: the score of one model with the mean of the members' weights."""
    uncertainty_coef: float = key(
        AT_LEAST_0, affects=results_of(Phase.ppo), is_inherited=False, unread=UNWEIGHTED
    )
    """Factor of the variance over the members, for combine=uncertainty."""

    def num_own_layers(self, total: int) -> int:
        """Return the number of a member's own layers in a model of ``total`` layers."""
        return self.member_layers or max(1, total // SHARED_LAYERS)
