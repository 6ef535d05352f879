"""The hook that leaves tokens with a high covariance out of the losses of a step.

Shapes: B = sequences of this rank, T = response tokens, N = tokens that may be left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.base.metrics import Mean
from rlhf.base.random_streams import random_stream
from rlhf.base.types import Rollout
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.objective import learned_tokens
from rlhf.phases.ppo.targets import TargetMaker, Targets, TargetSteps


class ClipCovHook(PpoHook):
    """A hook that sets advantages to 0 once per rollout, before the updates."""

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        """Add the step that leaves tokens out, by the advantages that the updates would use."""
        return {**steps, "clip_cov": self._leave_out_tokens}

    def _leave_out_tokens(self, maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
        """Set the advantage of drawn tokens to 0, so that no surrogate gives them a gradient.

        The covariance of a token is (log pi_old - mean) * (A - mean), with the means over the
        learned tokens of all ranks. The random numbers are keyed by step and rank.
        """
        config, used = maker.config, targets.advantages
        keep_BT = learned_tokens(config, rollout)
        sides = (rollout.logprobs_BT, used.advantages_BT)
        logprobs_BT, advantages_BT = (
            x_BT - maker.moments_over_ranks(x_BT, keep_BT).value() for x_BT in sides
        )
        covariances_BT = logprobs_BT * advantages_BT
        names = ("clip_cov", str(rollout.prompts.step), maker.ranks.rank)
        left_out_BT = draw_high_covariances(
            covariances_BT,
            keep_BT,
            low=config.clip_cov_low,
            high=config.clip_cov_high,
            ratio=config.clip_cov_ratio,
            draws=random_stream(self.config.seed, *names),
        )
        used_BT = used.advantages_BT.masked_fill(left_out_BT, 0.0)
        found = {
            "ppo/covariance": Mean.of(covariances_BT, keep_BT),
            "ppo/clip_cov_share": Mean.of(left_out_BT.float(), keep_BT),
        }
        return targets._replace(
            advantages=used._replace(advantages_BT=used_BT), metrics={**targets.metrics, **found}
        )


def draw_high_covariances(
    covariances_BT: Tensor,
    keep_BT: Tensor,
    *,
    low: float,
    high: float,
    ratio: float,
    draws: torch.Generator,
) -> Tensor:
    """Return True (B, T) at tokens to leave out, https://arxiv.org/abs/2505.22617 section 4.2.

    These are ``ratio`` of the kept tokens, rounded down, but at least one, drawn with equal
    probability from the kept tokens with low < covariance < high; all of them if there are fewer.
    """
    is_high_BT = keep_BT & (covariances_BT > low) & (covariances_BT < high)
    high_N = is_high_BT.flatten().nonzero().squeeze(1)
    most = max(1, int(ratio * int(keep_BT.sum())))
    drawn = torch.randperm(len(high_N), generator=draws)[:most].to(high_N.device)
    left_out = torch.zeros_like(keep_BT).flatten().index_fill(0, high_N[drawn], 1)
    return left_out.view_as(keep_BT)


HOOK = ClipCovHook
