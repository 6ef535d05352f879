"""Comparisons with OpenRLHF's advantages. Shapes as in ``parity_sides``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from papers.parity_sides import (
    GAMMA,
    GROUP,
    KL_COEF,
    LAM,
    ROWS,
    Inputs,
    Pair,
    Sides,
    Tensors,
    kept,
    our_whitened,
)
from rlhf.algorithms.advantages import (
    Advantages,
    gae,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
    token_rewards,
)

MAKER = "openrlhf/trainer/ppo_utils/experience_maker.py"


def advantage_pairs(maker: SimpleNamespace) -> list[Pair]:
    """Return all comparisons with the methods of the class that makes experience."""
    return [*_gae(maker), *_estimators(maker)]


def _gae(maker: SimpleNamespace) -> list[Pair]:
    def theirs(x: Inputs, keep_BT: Tensor) -> Tensors:
        found = maker.get_advantages_and_returns(
            None, x.values_BT, x.advantages_BT, keep_BT.double(), GAMMA, LAM
        )
        return kept(keep_BT, advantages=found[0], returns=found[1])

    def ours(x: Inputs, keep_BT: Tensor) -> Tensors:
        found = gae(x.advantages_BT, x.values_BT, keep_BT, gamma=GAMMA, lam=LAM)
        return kept(keep_BT, advantages=found.advantages_BT, returns=found.returns_BT)

    def holes_counted(x: Inputs) -> Tensors:
        """Each hole is a token with value 0 and reward 0."""
        values_BT, rewards_BT = (
            each.masked_fill(~x.holes_BT, 0.0) for each in (x.values_BT, x.advantages_BT)
        )
        every_BT = torch.ones_like(x.holes_BT)
        found = gae(rewards_BT, values_BT, every_BT, gamma=GAMMA, lam=LAM)
        return kept(x.holes_BT, advantages=found.advantages_BT, returns=found.returns_BT)

    where = f"{MAKER}: get_advantages_and_returns"
    return [
        Pair(
            "GAE and returns",
            where,
            "gae",
            lambda x: Sides(theirs(x, x.keep_BT), ours(x, x.keep_BT)),
        ),
        Pair(
            "GAE and returns, with holes between turns",
            where,
            "gae",
            lambda x: Sides(theirs(x, x.holes_BT), ours(x, x.holes_BT)),
            "a token that is not the policy's is a time step with value 0 and reward 0: what comes"
            " after is discounted by it, and its value of 0 is in the TD errors (here: skipped)",
            lambda x: Sides(theirs(x, x.holes_BT), holes_counted(x)),
        ),
    ]


def _estimators(maker: SimpleNamespace) -> list[Pair]:
    """Return comparisons of advantages with the KL penalty in the reward."""

    def theirs(x: Inputs, name: str, kl_coef: float) -> Tensors:
        experience = SimpleNamespace(
            rewards=x.scores_B.clone(),
            index=list(range(ROWS)),
            info={},
            kl=x.kl_BT,
            action_mask=x.keep_BT.double(),
            values=x.values_BT,
        )
        advantage = SimpleNamespace(estimator=name, gamma=1.0, lambd=LAM, no_std_norm=False)
        args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=GROUP),
            algo=SimpleNamespace(advantage=advantage),
            reward=SimpleNamespace(clip_range=None),
        )
        maker_self = SimpleNamespace(
            strategy=SimpleNamespace(args=args),
            kl_ctl=SimpleNamespace(value=kl_coef),
            advantage_estimator=name,
        )
        for method in ("get_advantages_and_returns", "get_cumulative_returns"):
            bound = getattr(maker, method).__get__(maker_self)
            setattr(maker_self, method, bound)
        maker.compute_advantages_and_returns(maker_self, [experience])
        return kept(x.keep_BT, advantages=experience.advantages)

    def shaped(x: Inputs) -> Tensor:
        return token_rewards(x.kl_BT, x.scores_B, x.keep_BT, kl_ctl=KL_COEF)

    def whitened(x: Inputs, made: Advantages) -> Tensors:
        return kept(x.keep_BT, advantages=our_whitened(made.advantages_BT, x.keep_BT))

    def of_group(x: Inputs, function: Callable[..., Advantages], **keys: bool) -> Tensors:
        made = function(shaped(x), x.keep_BT, group_size=GROUP, **keys)
        return kept(x.keep_BT, advantages=made.advantages_BT)

    def kl_to_go(
        x: Inputs, function: Callable[..., Advantages], *, eps: float = 0.0, **keys: bool
    ) -> Tensors:
        """The group's baseline is of scores alone; a token pays the penalties from it on."""
        made_BT = function(x.end_rewards_BT, x.keep_BT, group_size=GROUP, **keys).advantages_BT
        if eps:
            std_GK = x.scores_B.view(-1, GROUP).std(dim=1, keepdim=True).expand(-1, GROUP)
            made_BT = made_BT * ((std_GK + 1e-6) / (std_GK + eps)).reshape(-1, 1)
        costs_BT = token_rewards(x.kl_BT, torch.zeros_like(x.scores_B), x.keep_BT, kl_ctl=KL_COEF)
        paid_BT = reinforce_pp_advantages(costs_BT, x.keep_BT, gamma=1.0).advantages_BT
        return kept(x.keep_BT, advantages=made_BT + paid_BT)

    def grouped(
        quantity: str, name: str, function: Callable[..., Advantages], **keys: bool
    ) -> Pair:
        eps = 1e-9 if name == "group_norm" else 0.0
        also = "; 1e-9 is added to the standard deviation (here: 1e-6)" if eps else ""
        return Pair(
            quantity,
            f"{MAKER}: compute_advantages_and_returns, {name}",
            function.__name__,
            lambda x: Sides(theirs(x, name, KL_COEF), of_group(x, function, **keys)),
            "the group is compared by scores alone, and each token then pays the KL penalties from"
            f" it on (here: responses are compared by score minus penalty){also}",
            lambda x: Sides(theirs(x, name, KL_COEF), kl_to_go(x, function, eps=eps, **keys)),
        )

    where = f"{MAKER}: compute_advantages_and_returns"
    return [
        Pair(
            "token rewards, GAE and whitening",
            f"{where}, gae",
            "token_rewards, gae, whiten",
            lambda x: Sides(
                theirs(x, "gae", KL_COEF),
                whitened(x, gae(shaped(x), x.values_BT, x.keep_BT, gamma=1.0, lam=LAM)),
            ),
        ),
        Pair(
            "REINFORCE++'s advantages, with a KL penalty",
            f"{where}, reinforce",
            "reinforce_pp_advantages, whiten",
            lambda x: Sides(
                theirs(x, "reinforce", KL_COEF),
                whitened(x, reinforce_pp_advantages(shaped(x), x.keep_BT, gamma=1.0)),
            ),
        ),
        grouped("RLOO's advantages, with a KL penalty", "rloo", rloo_advantages),
        grouped("GRPO's advantages, with a KL penalty", "group_norm", grpo_advantages),
        grouped(
            "Dr. GRPO's advantages, with a KL penalty", "dr_grpo", grpo_advantages, divides=False
        ),
    ]
