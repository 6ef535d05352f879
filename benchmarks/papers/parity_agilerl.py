"""Comparisons with AgileRL. Shapes as in ``parity_sides``."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional

from papers.parity_sides import (
    BETA,
    CLIPS,
    GAMMA,
    GROUP,
    HIGH,
    KL_COEF,
    LAM,
    LOW,
    N_MINUS_1,
    ROWS,
    VALUE_CLIP,
    WIDTH,
    Inputs,
    Pair,
    Sides,
    Tensors,
    graded,
    kept,
    our_dpo,
    our_kl,
    our_policy,
    our_value,
    our_whitened,
    our_whitening,
)
from papers.peer_wheels import Wheels
from rlhf.algorithms.advantages import gae, grpo_advantages
from rlhf.algorithms.kl import KlEstimatorName
from rlhf.algorithms.ppo import cispo_loss, gspo_loss
from rlhf.config.schema.ppo import LossAggregation

UTILS = "agilerl/utils/llm_utils.py"
PPO = "agilerl/algorithms/ppo_llm.py"
GRPO = "agilerl/algorithms/grpo.py"
DPO = "agilerl/algorithms/dpo.py"


def pairs(wheels: Wheels) -> list[Pair]:
    """Return all comparisons."""
    utils = wheels.load(
        "AgileRL",
        UTILS,
        "fill_outside_mask masked_mean masked_var masked_whiten pool_by_turns"
        " pool_log_ratio_by_level clipped_min_surrogate clipped_is_surrogate calculate_k3_kl"
        " k3_kl_penalty_reference",
    )
    given = vars(utils)
    names = (
        "_ppo_policy_loss _compute_vf_loss_token _compute_gae_returns_token _compute_token_rewards"
        " _resolve_is_level"
    )
    ppo = wheels.load("AgileRL", PPO, " ".join(f"PPO.{name}" for name in names.split()), given)
    names = (
        "_compute_policy_loss _log_importance_weights _clipped_units _reduce_masked_loss"
        " _token_loss_weights _resolve_loss_window _calculate_advantage"
    )
    grpo = wheels.load("AgileRL", GRPO, " ".join(f"GRPO.{name}" for name in names.split()), given)
    names = "DPO._dpo_loss_standard DPO._compute_implicit_reward"
    dpo = wheels.load("AgileRL", DPO, names, {"F": functional})
    return [*_ppo(ppo), *_gae(ppo), *_grpo(grpo), *_others(utils, grpo, dpo)]


def _bound(methods: SimpleNamespace, **state: object) -> SimpleNamespace:
    """Return an object with the methods and the state that they read."""
    found = SimpleNamespace(**state)
    for name, method in vars(methods).items():
        setattr(found, name, method.__get__(found))
    return found


def _ppo(ppo: SimpleNamespace) -> list[Pair]:
    agent = _bound(
        ppo,
        clip_coef=LOW,
        beta=KL_COEF,
        kl_clamp=None,
        importance_sampling_level="token",
        turn_ratio_pooling="mean",
    )
    critic = _bound(ppo, clip_coef=VALUE_CLIP, vf_coef=1.0)

    def policy(x: Inputs) -> Tensors:
        turns_BT = torch.zeros((ROWS, WIDTH), dtype=torch.long).masked_fill(~x.keep_BT, -1)
        given = (x.keep_BT, x.old_BT, x.reference_BT, x.advantages_BT, turns_BT, 1, "token")
        return graded(lambda at: agent._ppo_policy_loss(at, *given)[0], x.logprobs_BT)

    def value(x: Inputs) -> Tensors:
        given = (x.old_values_BT, x.returns_BT, x.keep_BT)
        return graded(lambda at: critic._compute_vf_loss_token(at, *given), x.values_BT)

    return [
        Pair(
            "policy loss, clipped, with k3 in the loss",
            f"{PPO}: _ppo_policy_loss",
            "policy_loss, estimate_kl",
            lambda x: Sides(policy(x), our_policy(x, kl_coef=KL_COEF, cliprange=LOW)),
        ),
        Pair(
            "value loss, clipped",
            f"{PPO}: _compute_vf_loss_token",
            "value_loss",
            lambda x: Sides(value(x), our_value(x)),
        ),
    ]


def _gae(ppo: SimpleNamespace) -> list[Pair]:
    def theirs(x: Inputs, keep_BT: Tensor, *, whitens: bool) -> Tensors:
        agent = _bound(ppo, gamma=GAMMA, whiten_advantages=whitens)
        found = agent._compute_gae_returns_token(x.advantages_BT, x.values_BT, keep_BT, LAM)
        return kept(keep_BT, advantages=found[1], returns=found[0])

    def ours(x: Inputs, keep_BT: Tensor) -> Tensors:
        found = gae(x.advantages_BT, x.values_BT, keep_BT, gamma=GAMMA, lam=LAM)
        return kept(keep_BT, advantages=found.advantages_BT, returns=found.returns_BT)

    def whitened(x: Inputs, *, is_sample: bool) -> Tensors:
        found = gae(x.advantages_BT, x.values_BT, x.keep_BT, gamma=GAMMA, lam=LAM)
        whitened_BT = our_whitened(found.advantages_BT, x.keep_BT, is_sample=is_sample)
        return kept(x.keep_BT, advantages=whitened_BT, returns=found.returns_BT)

    def cut_at_holes(x: Inputs) -> Tensors:
        """Each run of tokens without a hole is a response of its own."""
        starts_BT = x.holes_BT & ~functional.pad(x.holes_BT, (1, 0))[:, :-1]
        run_BT = starts_BT.long().cumsum(dim=1).masked_fill(~x.holes_BT, 0)
        advantages_BT, returns_BT = torch.zeros_like(x.values_BT), torch.zeros_like(x.values_BT)
        for run in range(1, int(run_BT.max()) + 1):
            made = gae(x.advantages_BT, x.values_BT, run_BT == run, gamma=GAMMA, lam=LAM)
            advantages_BT, returns_BT = advantages_BT + made[0], returns_BT + made[1]
        return kept(x.holes_BT, advantages=advantages_BT, returns=returns_BT)

    def rewards(x: Inputs, *, at_end: bool) -> Tensors:
        """The score as the reward of one turn; ``at_end``: each token is a turn, the last pays."""
        turns_BT = torch.where(x.keep_BT, x.keep_BT.cumsum(1) - 1 if at_end else 0, -1)
        paid = x.end_rewards_BT if at_end else x.scores_B[:, None]
        return kept(x.keep_BT, rewards=agent._compute_token_rewards(x.keep_BT, paid, turns_BT))

    where = f"{PPO}: _compute_gae_returns_token"
    agent = _bound(ppo)
    return [
        Pair(
            "token rewards",
            f"{PPO}: _compute_token_rewards",
            "token_rewards",
            lambda x: Sides(rewards(x, at_end=False), kept(x.keep_BT, rewards=x.end_rewards_BT)),
            "the reward of a turn is that of each of its tokens, so that a long response earns it"
            " more often (here: the last token's)",
            lambda x: Sides(rewards(x, at_end=True), kept(x.keep_BT, rewards=x.end_rewards_BT)),
        ),
        Pair(
            "GAE and returns",
            where,
            "gae",
            lambda x: Sides(theirs(x, x.keep_BT, whitens=False), ours(x, x.keep_BT)),
        ),
        Pair(
            "GAE, whitened, and returns",
            where,
            "gae, whiten",
            lambda x: Sides(theirs(x, x.keep_BT, whitens=True), whitened(x, is_sample=False)),
            N_MINUS_1,
            lambda x: Sides(theirs(x, x.keep_BT, whitens=True), whitened(x, is_sample=True)),
        ),
        Pair(
            "GAE and returns, with holes between turns",
            where,
            "gae",
            lambda x: Sides(theirs(x, x.holes_BT, whitens=False), ours(x, x.holes_BT)),
            "with one time step per token, a hole ends the episode: no value and no advantage comes"
            " back over it (here: the next token of the policy is the next step)",
            lambda x: Sides(theirs(x, x.holes_BT, whitens=False), cut_at_holes(x)),
        ),
    ]


def _grpo(grpo: SimpleNamespace) -> list[Pair]:
    def theirs(
        x: Inputs,
        *,
        level: str = "token",
        objective: str = "grpo",
        kl_coef: float = 0.0,
        corrects_kl: bool = True,
        most: float = 1 + HIGH,
        is_token_mean: bool = False,
    ) -> Tensors:
        agent = _bound(
            grpo,
            clip_coef_min=1 - LOW,
            clip_coef_max=most,
            beta=kl_coef,
            kl_clamp=None,
            use_kl_advantage_shaping=False,
            use_bias_correction_kl=corrects_kl,
            _masks_off_policy_tokens=False,
            _segment_accumulation_steps=None,
            loss_norm="window" if is_token_mean else "micro_batch",
            gradient_accumulation_steps=1,
            _window_action_tokens=float(x.keep_BT.sum()),
        )
        given = (x.old_BT, x.reference_BT, x.row_advantages_B[:, None], None, level, objective)
        return graded(
            lambda at: agent._compute_policy_loss(x.keep_BT, at, *given)[0], x.logprobs_BT
        )

    sequence = LossAggregation.sequence_mean
    where = f"{GRPO}: _compute_policy_loss"

    def with_kl(x: Inputs, estimator: KlEstimatorName) -> Tensors:
        keys = {"how": sequence, "advantages_BT": x.spread_BT, "kl_coef": KL_COEF}
        return our_policy(x, estimator=estimator, **keys, **CLIPS)

    return [
        Pair(
            "GRPO, with k3 times the ratio in the loss, mean of sequence means",
            where,
            "policy_loss, estimate_kl",
            lambda x: Sides(theirs(x, kl_coef=KL_COEF), with_kl(x, "k3_ratio")),
        ),
        Pair(
            "GRPO, with k3 in the loss, mean of sequence means",
            f"{where}, use_bias_correction_kl=False",
            "policy_loss, estimate_kl",
            lambda x: Sides(theirs(x, kl_coef=KL_COEF, corrects_kl=False), with_kl(x, "k3")),
        ),
        Pair(
            "GRPO, mean over tokens",
            where,
            "policy_loss",
            lambda x: Sides(
                theirs(x, is_token_mean=True), our_policy(x, advantages_BT=x.spread_BT, **CLIPS)
            ),
        ),
        Pair(
            "GSPO",
            f"{where}, trajectory",
            "gspo_loss",
            lambda x: Sides(
                theirs(x, level="trajectory"),
                our_policy(x, gspo_loss, how=sequence, advantages_BT=x.spread_BT, **CLIPS),
            ),
        ),
        Pair(
            "CISPO, mean over tokens",
            f"{where}, cispo",
            "cispo_loss",
            lambda x: Sides(
                theirs(x, objective="cispo", is_token_mean=True),
                our_policy(x, cispo_loss, advantages_BT=x.spread_BT, cliprange_high=HIGH),
            ),
        ),
    ]


def _others(utils: SimpleNamespace, grpo: SimpleNamespace, dpo: SimpleNamespace) -> list[Pair]:
    def advantages(x: Inputs, norm: str) -> Tensors:
        agent = _bound(grpo, group_size=GROUP, adv_norm=norm)
        found_B1 = agent._calculate_advantage(x.scores_B)
        return kept(x.keep_BT, advantages=found_B1.expand(ROWS, WIDTH))

    def ours(x: Inputs, *, divides: bool = True, eps: float = 1e-6) -> Tensors:
        made = grpo_advantages(x.end_rewards_BT, x.keep_BT, group_size=GROUP, divides=divides)
        std_GK = x.scores_B.view(-1, GROUP).std(dim=1, keepdim=True).expand(-1, GROUP)
        found_BT = made.advantages_BT * ((std_GK + 1e-6) / (std_GK + eps)).reshape(-1, 1)
        return kept(x.keep_BT, advantages=found_BT)

    def k3(x: Inputs) -> Tensors:
        return graded(lambda at: utils.calculate_k3_kl(x.reference_BT, at), x.logprobs_BT)

    def whitened(x: Inputs) -> Tensors:
        return kept(x.keep_BT, whitened=utils.masked_whiten(x.advantages_BT, x.keep_BT))

    def their_dpo(x: Inputs) -> Tensors:
        agent, half = _bound(dpo, beta=BETA, nll_alpha=0.0), ROWS // 2
        tensors = (x.logprobs_BT, x.reference_BT, x.keep_BT)
        chosen_BT, *others = [part for each in tensors for part in each.split(half)]
        found = graded(lambda at: agent._dpo_loss_standard(at, *others)[0], chosen_BT)
        # All tokens of a response have its gradient.
        return {"value": found["value"], "gradient": found["gradient"][:, 0]}

    return [
        Pair(
            "GRPO's advantages",
            f"{GRPO}: _calculate_advantage",
            "grpo_advantages",
            lambda x: Sides(advantages(x, "mean_std"), ours(x)),
            "1e-8 is added to the standard deviation (here: 1e-6)",
            lambda x: Sides(advantages(x, "mean_std"), ours(x, eps=1e-8)),
        ),
        Pair(
            "Dr. GRPO's advantages",
            f"{GRPO}: _calculate_advantage",
            "grpo_advantages",
            lambda x: Sides(advantages(x, "mean_only"), ours(x, divides=False)),
        ),
        Pair(
            "KL estimator k3",
            f"{UTILS}: calculate_k3_kl",
            "estimate_kl",
            lambda x: Sides(k3(x), our_kl(x, "k3")),
        ),
        Pair(
            "whitening",
            f"{UTILS}: masked_whiten",
            "whiten",
            lambda x: Sides(whitened(x), our_whitening(x)),
            N_MINUS_1,
            lambda x: Sides(whitened(x), our_whitening(x, is_sample=True)),
        ),
        Pair(
            "DPO",
            f"{DPO}: _dpo_loss_standard",
            "dpo_loss",
            lambda x: Sides(their_dpo(x), our_dpo(x)),
        ),
    ]
