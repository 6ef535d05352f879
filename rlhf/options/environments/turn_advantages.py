"""Advantages of episodes with one time step per turn.

Shapes: B = episodes, T = tokens after the prompt, K = turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms.advantages import Advantages, gae


def turn_gae(
    rewards_BT: Tensor,
    costs_BT: Tensor,
    values_BT: Tensor,
    turn_BT: Tensor,
    *,
    gamma: float,
    lam: float,
    last_values_B: Tensor | None = None,
) -> Advantages:
    """Compute advantages with one time step per turn, https://arxiv.org/abs/2512.17008.

    A turn's reward is the sum of its tokens' rewards, and its value is the value before its first
    token. All tokens of a turn get the turn's advantage and return, as with AReaL's
    ``gae_timestep_unit: turn`` (areal/trainer/ppo/gae.py). The KL penalty ``costs_BT`` of a token
    is subtracted from the advantage of this token only, so gamma and lam carry none of it to other
    tokens. ``turn_BT`` is -1 at tokens that the policy did not write.
    """
    keep_BT = turn_BT >= 0
    num_turns, end = int(turn_BT.max()) + 1, turn_BT.shape[1]
    turn_index_BT = turn_BT.clamp(min=0)
    columns_T = torch.arange(end, device=turn_BT.device)
    columns_BT = columns_T.expand_as(turn_BT).masked_fill(~keep_BT, end)
    first_BK = columns_BT.new_full((len(turn_BT), num_turns), end)
    first_BK = first_BK.scatter_reduce(1, turn_index_BT, columns_BT, "amin")
    rewards_BK = rewards_BT.new_zeros(first_BK.shape)
    rewards_BK = rewards_BK.scatter_add(1, turn_index_BT, rewards_BT.masked_fill(~keep_BT, 0.0))
    turn_advantages = gae(
        rewards_BK,
        values_BT.gather(1, first_BK.clamp(max=end - 1)),
        first_BK < end,
        gamma=gamma,
        lam=lam,
        last_values_B=last_values_B,
    )
    advantages_BT, returns_BT = (
        each_BK.gather(1, turn_index_BT).masked_fill(~keep_BT, 0.0) for each_BK in turn_advantages
    )
    return Advantages(advantages_BT - costs_BT.masked_fill(~keep_BT, 0.0), returns_BT)
