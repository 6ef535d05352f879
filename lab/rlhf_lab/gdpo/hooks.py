"""The hook that normalises each reward over the responses to a prompt before they are added.

Shapes: B = sequences of this rank, K = rewards, G = groups of R responses to one prompt.
"""

from __future__ import annotations

import torch

from rlhf.algorithms.advantages import normalise_in_groups
from rlhf.base.types import Rollout
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.reward_mix import sum_weighted_scores
from rlhf.phases.ppo.targets import TargetMaker, Targets, TargetSteps, combine_parts, replace_step


class GdpoHook(PpoHook):
    """A hook that replaces the scores by GDPO's sums of normalised rewards."""

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        """Return the steps, with the step that combines the rewards replaced by GDPO's."""
        return replace_step(steps, combine_parts, _combine_normalised_rewards)


def _combine_normalised_rewards(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """Replace the scores by weighted sums of normalised rewards, normalised over the rollout.

    https://arxiv.org/abs/2601.05242. The sums have mean 0 in each group, so
    ppo.advantage_estimator=dr_grpo takes them as they are.
    """
    assert rollout.parts is not None, "the rollout was scored without rewards"
    scores_BK = rollout.parts.scores_BK
    # fp64, as in ``grpo_advantages``, makes the deviation of equal scores exactly 0.
    scores_GRK = scores_BK.double().view(-1, targets.compared, scores_BK.shape[1])
    normalised_BK = normalise_in_groups(scores_GRK).view_as(scores_BK).to(scores_BK.dtype)
    sums_B = sum_weighted_scores(maker.parts, normalised_BK)
    everything_B = torch.ones_like(sums_B, dtype=torch.bool)
    return targets._replace(scores_B=maker.whiten(sums_B, everything_B, shift_mean=True))
