"""The hook that leaves tokens with a high covariance out of the losses of a step.

Shapes: B = sequences of this rank, T = response tokens, N = cells of a mask that are True.
"""

from __future__ import annotations

from decimal import Decimal

import torch
from torch import Tensor

from rlhf.base.metrics import Mean
from rlhf.base.random_streams import random_stream
from rlhf.base.types import Rollout
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.objective import learned_mask
from rlhf.phases.ppo.targets import TargetMaker, Targets, TargetSteps
from rlhf_lab.clip_cov import ClipCovKeys


class ClipCovHook(PpoHook):
    """A hook that sets advantages to 0 once per rollout, before the updates."""

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        """Add a last step, which drops tokens given the advantages that the updates would use."""
        return (*steps, self._leave_out_tokens)

    def _leave_out_tokens(self, maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
        """Set the advantages of drawn tokens to 0, so that no surrogate gives them a gradient.

        The covariance of a token is (log pi_old - mean) * (A - mean), with the means over the
        learned tokens of all ranks, https://arxiv.org/abs/2505.22617 section 4.2. A rank draws the
        configured share of its learned tokens, rounded down, but at least one, from those with a
        covariance between the limits. The random numbers are keyed by step and rank.
        """
        keys, used = ClipCovKeys.of(maker.config), targets.advantages
        keep_BT = learned_mask(maker.config, rollout)
        factors = (rollout.logprobs_BT, used.advantages_BT)
        logprobs_BT, advantages_BT = (
            x_BT - maker.moments_over_ranks(x_BT, keep_BT).value() for x_BT in factors
        )
        covariances_BT = logprobs_BT * advantages_BT
        low, high = keys.clip_cov_low, keys.clip_cov_high
        is_high_BT = keep_BT & (covariances_BT > low) & (covariances_BT < high)
        most = max(1, int(Decimal(str(keys.clip_cov_ratio)) * int(keep_BT.sum())))
        names = ("clip_cov", str(rollout.prompts.step), maker.ranks.rank)
        draws = random_stream(self.config.seed, *names)
        left_out_BT = draw_cells(is_high_BT, most, draws)
        used_BT = used.advantages_BT.masked_fill(left_out_BT, 0.0)
        metrics = {
            "ppo/covariance": Mean.of(covariances_BT, keep_BT),
            "ppo/clip_cov_share": Mean.of(left_out_BT.float(), keep_BT),
        }
        return targets._replace(
            advantages=used._replace(advantages_BT=used_BT), metrics={**targets.metrics, **metrics}
        )


def draw_cells(mask_BT: Tensor, most: int, draws: torch.Generator) -> Tensor:
    """Return a mask with ``most`` of the True cells of ``mask_BT``, drawn at random, or all."""
    cells_N = mask_BT.flatten().nonzero().squeeze(1)
    drawn = torch.randperm(len(cells_N), generator=draws)[:most].to(cells_N.device)
    return torch.zeros_like(mask_BT).flatten().index_fill(0, cells_N[drawn], 1).view_as(mask_BT)
