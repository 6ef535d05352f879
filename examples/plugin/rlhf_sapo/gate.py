"""The soft gate of SAPO. Shapes: B = sequences, T = response tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf.algorithms.masking import masked_sum
from rlhf.algorithms.ppo import PolicyLoss, limited_loss, log_ratio
from rlhf.base.metrics import Metrics
from rlhf.options import PpoConfig
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.objective import Surrogate, SurrogateInputs, Total
from rlhf_sapo import SapoKeys

CLOSED = 0.5  # a token counts as clipped if its gradient is below this share of PPO's


def sapo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    keep_BT: Tensor,
    *,
    temperatures: tuple[float, float],
    total: Callable[[Tensor, Tensor], Tensor] = masked_sum,
) -> PolicyLoss:
    """Compute SAPO's loss; ``temperatures`` are of tokens with A > 0 and with A <= 0.

    loss = -A * sigmoid(t * (ratio - 1)) * 4 / t

    Its gradient is that of -A * ratio times 4 p (1 - p), with p = sigmoid(t * (ratio - 1)): equal
    at a ratio of 1, and vanishing far from it.
    """
    log_ratio_BT = log_ratio(logprobs_BT, old_logprobs_BT, keep_BT)
    positive, negative = temperatures
    temperature_BT = torch.where(advantages_BT > 0, positive, negative)
    open_BT = torch.sigmoid(temperature_BT * (log_ratio_BT.exp() - 1))
    loss_BT = -advantages_BT * open_BT * 4 / temperature_BT
    closed_BT = 4 * open_BT.detach() * (1 - open_BT.detach()) < CLOSED
    return limited_loss(loss_BT, log_ratio_BT, closed_BT, keep_BT, total)


class SapoHook(PpoHook):
    """A hook that replaces PPO's surrogate."""

    def change_surrogate(self, surrogate: Surrogate) -> Surrogate:
        """Return SAPO's surrogate in place of ``surrogate``."""
        keys = SapoKeys.of(self.config)
        temperatures = (keys.sapo_temperature, keys.sapo_negative_temperature)

        def gated(
            inputs: SurrogateInputs, _: PpoConfig, total: Total, /
        ) -> tuple[PolicyLoss, Metrics]:
            return sapo_loss(*inputs[:4], temperatures=temperatures, total=total), {}

        return gated
