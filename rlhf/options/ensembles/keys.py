"""Keys of the reward model's members, and of the score that combines their scores."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlhf.base.seams import MeasureNames
from rlhf.config.choices import Phase
from rlhf.config.schema.keys import (
    ABOVE_0,
    AT_LEAST_0,
    ONLY_PPO,
    Unread,
    always_affects,
    key,
    needs,
)

MEMBERS_FILE = "members.safetensors"  # in the folder with the weights of the first member
OWN_SHARE = 4  # by default, 1 / OWN_SHARE of all layers are a further member's own


MEASURES = MeasureNames(evaluated=["disagreement"])


class CombineName(StrEnum):
    """Ways to combine the members' scores to one score; warm averages the weights instead."""

    mean = "mean"
    worst = "worst"
    uncertainty = "uncertainty"
    warm = "warm"


def combining_phases(config: Any) -> frozenset[Phase]:
    """Return the phases whose results reward.combine changes: PPO, and with warm also reward."""
    trains = {Phase.reward} if config.reward.combine is CombineName.warm else set()
    return frozenset({Phase.ppo, *trains})


SEVERAL = [Unread(("members",), lambda members: members == 1, "add {key}=5")]
WEIGHTED = [needs("combine", "uncertainty")]


@dataclass(kw_only=True)
class EnsembleKeys:
    """Keys of the group ``reward`` for an ensemble of reward models."""

    members: int = key(ABOVE_0, affects=always_affects(Phase.reward, Phase.ppo), is_inherited=True)
    """Reward models of the ensemble: the first is trained whole, the others on its layers."""
    member_layers: int | None = key(
        ABOVE_0, affects=always_affects(Phase.reward, Phase.ppo), is_inherited=True, unread=SEVERAL
    )
    """Top layers that each further member has as its own; null: a quarter of all, at least one."""
    member_epochs: float = key(ABOVE_0, unread=SEVERAL)
    """Passes over the pairs in which the further members learn, after those of the first."""
    reweight_pairs: bool = key(unread=SEVERAL)
    """Each further member draws its own weight of each pair in its loss (Bayesian bootstrap)."""
    combine: CombineName = key(affects=combining_phases, is_inherited=False, unread=SEVERAL)
    """Score of a response: mean, worst or uncertainty (mean minus variance) of the members'
    scores; warm: the score of one model with the mean of the members' weights."""
    uncertainty_coef: float = key(AT_LEAST_0, affects=ONLY_PPO, is_inherited=False, unread=WEIGHTED)
    """Factor of the variance over the members, for combine=uncertainty."""

    def num_own_layers(self, total: int) -> int:
        """Return the number of layers that a further member has as its own, of ``total`` layers."""
        return self.member_layers or max(1, total // OWN_SHARE)
