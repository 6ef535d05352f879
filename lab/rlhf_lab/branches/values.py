"""Estimate true values of states from branches, and compute advantages from true values.

A state is a prompt and the first tokens of a response. Its true value is the expected sum of the
rewards that follow it; the mean over sampled continuations (branches) is an unbiased estimate:
VinePPO, https://arxiv.org/abs/2410.01679 section 4.

Shapes: B = sequences, T = response tokens, N = states, K = branches per state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms.advantages import Advantages, reinforce_pp_advantages


def choose_steps(draws_N: Tensor, lengths_N: Tensor, *, step_tokens: int) -> tuple[Tensor, Tensor]:
    """Choose a step of each response, which ends before a random token of the response.

    Return the number of response tokens before each step (N,), and up to the step's end (N,). A
    step has ``step_tokens`` tokens, or all tokens before its end if they are fewer. ``draws_N`` are
    uniform random numbers.
    """
    ends_N = (draws_N * lengths_N).long().clamp(max=lengths_N - 1)
    return (ends_N - step_tokens).clamp(min=0), ends_N


def rewards_to_go(rewards_BT: Tensor, keep_BT: Tensor, starts_B: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted sums (B,) of the rewards from token ``starts_B`` on."""
    returns_BT = reinforce_pp_advantages(rewards_BT, keep_BT, gamma=gamma).returns_BT
    return returns_BT.gather(1, starts_B[:, None]).squeeze(1)


def average_returns(returns_B: Tensor, *, branches: int) -> tuple[Tensor, Tensor]:
    """Return the mean of every ``branches`` adjacent returns, and the mean's standard error."""
    returns_NK = returns_B.double().view(-1, branches)
    return returns_NK.mean(dim=1), returns_NK.std(dim=1) / branches**0.5


def step_advantages(
    rewards_BT: Tensor, step_values_BT: Tensor, keep_BT: Tensor, *, gamma: float
) -> Advantages:
    """Compute VinePPO's advantages of steps, https://arxiv.org/abs/2410.01679 section 4.

        A = sum of the step's rewards + V(after the step) - V(before the step)

    ``step_values_BT`` has V before the first token of each step, and NaN at other tokens. All
    tokens of a step get its advantage. The critic's target is V at the first token of a step; at
    other tokens it is the sum of the rewards up to the next step, plus V before that step.
    """
    starts_BT = ~step_values_BT.isnan()
    target_B = torch.zeros_like(rewards_BT[:, 0])  # target of the next token
    returns, targets = [], []
    for t in reversed(range(rewards_BT.shape[1])):
        return_B = torch.where(keep_BT[:, t], rewards_BT[:, t] + gamma * target_B, 0.0)
        target_B = torch.where(starts_BT[:, t], step_values_BT[:, t], return_B)
        returns.append(return_B)
        targets.append(target_B)
    returns_BT, targets_BT = (torch.stack(columns[::-1], dim=1) for columns in (returns, targets))
    columns_T = torch.arange(starts_BT.shape[1], device=keep_BT.device)
    first_BT = (starts_BT * columns_T).cummax(dim=1).values
    advantages_BT = (returns_BT - targets_BT).gather(1, first_BT)
    return Advantages(advantages_BT.masked_fill(~keep_BT, 0.0), targets_BT)
