"""The hook that normalises each reward over the responses to a prompt before they are added.

Shapes: B = sequences of this rank, K = rewards, G = groups of R responses to one prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.base.types import Rollout
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.reward_mix import sum_weighted_scores
from rlhf.phases.ppo.targets import TargetMaker, Targets, TargetSteps


class GdpoHook(PpoHook):
    """A hook that makes the scores from which GDPO's advantages follow."""

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        """Return the steps, which combine the rewards by GDPO."""
        return {**steps, "combine": _combine_normalised_rewards}


def normalise_in_groups(scores_BK: Tensor, *, group_size: int) -> Tensor:
    """Return each reward's (score - mean) / (std + 1e-6) over the responses to a prompt.

    https://arxiv.org/abs/2601.05242. The rows of one prompt must be adjacent. As in
    ``grpo_advantages``, std is the sample deviation, and fp64 makes equal scores exactly 0.
    """
    scores_GRK = scores_BK.double().view(-1, group_size, scores_BK.shape[1])
    centred_GRK = scores_GRK - scores_GRK.mean(dim=1, keepdim=True)
    normalised_GRK = centred_GRK / (scores_GRK.std(dim=1, keepdim=True) + 1e-6)
    return normalised_GRK.view_as(scores_BK).to(scores_BK.dtype)


def _combine_normalised_rewards(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """Replace the scores by weighted sums of normalised rewards, normalised over the rollout.

    https://arxiv.org/abs/2601.05242. The sums have mean 0 in each group, so
    ppo.advantage_estimator=dr_grpo takes them as they are.
    """
    assert rollout.parts is not None, "the rollout was scored without rewards"
    scores_BK = normalise_in_groups(rollout.parts.scores_BK, group_size=targets.compared)
    sums_B = sum_weighted_scores(maker.parts, scores_BK)
    everything_B = torch.ones_like(sums_B, dtype=torch.bool)
    return targets._replace(scores_B=maker.whiten(sums_B, everything_B, shift_mean=True))


HOOK = GdpoHook
