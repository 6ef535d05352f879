"""Comparisons with verl. Shapes as in ``parity_sides``."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from torch import Tensor

from papers.parity_sides import (
    CLIPS,
    DUAL,
    GAMMA,
    GROUP,
    HIGH,
    LAM,
    LONGEST,
    LOW,
    N_MINUS_1,
    ROWS,
    VALUE_CLIP,
    WIDTH,
    Inputs,
    Pair,
    Sides,
    Tensors,
    far_kl,
    graded,
    kept,
    our_kl,
    our_policy,
    our_value,
    our_whitened,
    our_whitening,
)
from papers.peer_wheels import Wheels
from rlhf.algorithms.advantages import (
    gae,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
)
from rlhf.algorithms.ppo import cispo_loss, dppo_loss, gspo_loss
from rlhf.config.schema.ppo import LossAggregation

CORE = "verl/trainer/ppo/core_algos.py"


class ActorConfig(SimpleNamespace):
    """The keys that verl's policy losses read."""

    def get(self, key: str, default: object) -> object:
        """Return a key that may be absent."""
        return getattr(self, key, default)


class AlgoConfig:
    """A class that verl checks for."""


def pairs(wheels: Wheels) -> list[Pair]:
    """Return all comparisons."""
    masked = wheels.load(
        "verl",
        "verl/utils/torch_functional.py",
        "masked_sum masked_mean masked_var masked_whiten clip_by_value",
    )
    core = wheels.load(
        "verl",
        CORE,
        "agg_loss compute_policy_loss_vanilla compute_policy_loss_gspo compute_policy_loss_cispo"
        " compute_policy_loss_dppo_tv compute_policy_loss_dppo_kl"
        " compute_value_loss kl_penalty kl_penalty_forward compute_gae_advantage_return"
        " compute_grpo_outcome_advantage compute_rloo_outcome_advantage"
        " compute_reinforce_plus_plus_outcome_advantage",
        {"verl_F": masked, "ActorConfig": ActorConfig, "AlgoConfig": AlgoConfig},
    )
    return [*_policy(core), *_others(core, masked), *_advantages(core)]


def _policy(core: SimpleNamespace) -> list[Pair]:
    def theirs(
        inputs: Inputs,
        name: str = "vanilla",
        how: str = "token-mean",
        advantages_BT: Tensor | None = None,
        **keys: float,
    ) -> Tensors:
        clips = {"clip_ratio": LOW, "clip_ratio_low": LOW, "clip_ratio_high": HIGH, **keys}
        config = ActorConfig(global_batch_info={}, **clips)
        given_BT = inputs.advantages_BT if advantages_BT is None else advantages_BT
        loss = getattr(core, f"compute_policy_loss_{name}")
        return graded(
            lambda at: loss(inputs.old_BT, at, given_BT, inputs.keep_BT.double(), how, config)[0],
            inputs.logprobs_BT,
        )

    dual = {**CLIPS, "dual_clip": DUAL}
    vanilla = f"{CORE}: compute_policy_loss_vanilla"
    sequence, fixed = LossAggregation.sequence_mean, LossAggregation.fixed_length
    return [
        Pair(
            "policy loss, clipped",
            vanilla,
            "policy_loss",
            lambda x: Sides(theirs(x), our_policy(x, **CLIPS)),
            "a dual clip at ratio 3 is always on (clip_ratio_c; here: ppo.dual_clip, off)",
            lambda x: Sides(theirs(x), our_policy(x, **dual)),
        ),
        Pair(
            "policy loss, dual clip, mean of sequence means",
            vanilla,
            "policy_loss",
            lambda x: Sides(
                theirs(x, how="seq-mean-token-mean"), our_policy(x, how=sequence, **dual)
            ),
        ),
        Pair(
            "policy loss, Dr. GRPO's divisor",
            f"{CORE}: agg_loss, seq-mean-token-sum-norm",
            "Aggregation, fixed_length",
            lambda x: Sides(
                theirs(x, how="seq-mean-token-sum-norm"), our_policy(x, how=fixed, **dual)
            ),
            f"sums are divided by the width of the padded batch ({WIDTH} here) unless"
            f" loss_scale_factor is set (here: by the longest possible response, {LONGEST})",
            lambda x: Sides(
                theirs(x, how="seq-mean-token-sum-norm"),
                our_policy(x, how=fixed, longest=WIDTH, **dual),
            ),
        ),
        Pair(
            "GSPO",
            f"{CORE}: compute_policy_loss_gspo",
            "gspo_loss",
            lambda x: Sides(
                theirs(x, "gspo", "seq-mean-token-mean"),
                our_policy(x, gspo_loss, how=sequence, **CLIPS),
            ),
        ),
        Pair(
            "CISPO",
            f"{CORE}: compute_policy_loss_cispo",
            "cispo_loss",
            lambda x: Sides(theirs(x, "cispo"), our_policy(x, cispo_loss, cliprange_high=HIGH)),
            "the ratio is also limited from below, at 1 - clip_ratio_low (the paper's experiments,"
            " and here: not)",
            lambda x: Sides(
                theirs(x, "cispo", clip_ratio_low=1.0),
                our_policy(x, cispo_loss, cliprange_high=HIGH),
            ),
        ),
        *(
            Pair(
                f"DPPO, {name}",
                f"{CORE}: compute_policy_loss_{name}, clip_ratio_c=20",
                "dppo_loss",
                lambda x, name=name, loss=loss: Sides(
                    theirs(_with_rare_tokens(x), name, clip_ratio_c=20.0),
                    our_policy(_with_rare_tokens(x), loss),
                ),
            )
            for name, loss in {
                "dppo_tv": partial(dppo_loss, divergence="tv", limits=(LOW, HIGH)),
                "dppo_kl": partial(dppo_loss, divergence="kl", limits=(LOW, HIGH)),
            }.items()
        ),
    ]


def _with_rare_tokens(inputs: Inputs) -> Inputs:
    """Return log-probs below 0; the first token of half of the rows became e^7 times as likely."""
    old_BT, new_BT = (-each_BT.abs() - 0.01 for each_BT in (inputs.old_BT, inputs.logprobs_BT))
    old_BT[::2, 0], new_BT[::2, 0] = -14.0, -7.0
    return inputs._replace(old_BT=old_BT, logprobs_BT=new_BT)


def _others(core: SimpleNamespace, masked: SimpleNamespace) -> list[Pair]:
    def value(x: Inputs) -> Tensors:
        keep_BT = x.keep_BT.double()
        return graded(
            lambda at: core.compute_value_loss(
                at, x.returns_BT, x.old_values_BT, keep_BT, VALUE_CLIP
            )[0],
            x.values_BT,
        )

    def kl(reference_BT: Tensor, x: Inputs, name: str) -> Tensors:
        return graded(lambda at: core.kl_penalty(at, reference_BT, name), x.logprobs_BT)

    def whitened(x: Inputs) -> Tensors:
        found_BT = masked.masked_whiten(x.advantages_BT, x.keep_BT.double())
        return kept(x.keep_BT, whitened=found_BT)

    same = [
        Pair(
            f"KL estimator {name}",
            f"{CORE}: kl_penalty",
            "estimate_kl",
            lambda x, name=name: Sides(kl(x.reference_BT, x, name), our_kl(x, name)),
        )
        for name in ("k1", "k2", "k3")
    ]
    return [
        Pair(
            "value loss, clipped",
            f"{CORE}: compute_value_loss",
            "value_loss",
            lambda x: Sides(value(x), our_value(x)),
        ),
        *same,
        Pair(
            "KL estimator k3, far from the reference",
            f"{CORE}: kl_penalty",
            "estimate_kl",
            lambda x: Sides(kl(x.far_BT, x, "k3"), far_kl(x, "k3")),
            "values above 10 are cut to 10, and have no gradient (here: neither)",
            lambda x: Sides(kl(x.far_BT, x, "k3"), far_kl(x, "k3", high=10.0)),
        ),
        Pair(
            "whitening",
            "verl/utils/torch_functional.py: masked_whiten",
            "whiten",
            lambda x: Sides(whitened(x), our_whitening(x)),
            N_MINUS_1,
            lambda x: Sides(whitened(x), our_whitening(x, is_sample=True)),
        ),
    ]


def _advantages(core: SimpleNamespace) -> list[Pair]:
    groups = [row // GROUP for row in range(ROWS)]

    def their_gae(x: Inputs, keep_BT: Tensor) -> Tensors:
        found = core.compute_gae_advantage_return(
            x.advantages_BT, x.values_BT, keep_BT.double(), GAMMA, LAM
        )
        return kept(keep_BT, advantages=found[0], returns=found[1])

    def our_gae(x: Inputs, keep_BT: Tensor, *, is_sample: bool) -> Tensors:
        found = gae(x.advantages_BT, x.values_BT, keep_BT, gamma=GAMMA, lam=LAM)
        whitened_BT = our_whitened(found.advantages_BT, keep_BT, is_sample=is_sample)
        return kept(keep_BT, advantages=whitened_BT, returns=found.returns_BT)

    def of_groups(x: Inputs, name: str, **keys: bool) -> Tensors:
        loss = getattr(core, f"compute_{name}_outcome_advantage")
        rewards_BT = x.end_rewards_BT
        found_BT, _ = loss(rewards_BT, x.keep_BT.double(), index=groups, **keys)
        return kept(x.keep_BT, advantages=found_BT)

    def ours(x: Inputs, function: object, **keys: bool) -> Tensors:
        found = function(x.end_rewards_BT, x.keep_BT, group_size=GROUP, **keys)
        return kept(x.keep_BT, advantages=found.advantages_BT)

    def their_reinforce(x: Inputs) -> Tensors:
        config = SimpleNamespace(gamma=GAMMA)
        function = core.compute_reinforce_plus_plus_outcome_advantage
        found_BT, _ = function(x.end_rewards_BT, x.keep_BT.double(), config=config)
        return kept(x.keep_BT, advantages=found_BT)

    def our_reinforce(x: Inputs, *, is_sample: bool) -> Tensors:
        raw = reinforce_pp_advantages(x.end_rewards_BT, x.keep_BT, gamma=GAMMA)
        found_BT = our_whitened(raw.advantages_BT, x.keep_BT, is_sample=is_sample)
        return kept(x.keep_BT, advantages=found_BT)

    def of_gae(quantity: str, mask: str) -> Pair:
        def sides(x: Inputs, *, is_sample: bool) -> Sides:
            keep_BT = getattr(x, mask)
            return Sides(their_gae(x, keep_BT), our_gae(x, keep_BT, is_sample=is_sample))

        return Pair(
            quantity,
            f"{CORE}: compute_gae_advantage_return",
            "gae, whiten",
            lambda x: sides(x, is_sample=False),
            N_MINUS_1,
            lambda x: sides(x, is_sample=True),
        )

    return [
        of_gae("GAE, whitened, and returns", "keep_BT"),
        of_gae("GAE, whitened, and returns, with holes between turns", "holes_BT"),
        Pair(
            "GRPO's advantages",
            f"{CORE}: compute_grpo_outcome_advantage",
            "grpo_advantages",
            lambda x: Sides(of_groups(x, "grpo"), ours(x, grpo_advantages)),
        ),
        Pair(
            "Dr. GRPO's advantages",
            f"{CORE}: compute_grpo_outcome_advantage",
            "grpo_advantages",
            lambda x: Sides(
                of_groups(x, "grpo", norm_adv_by_std_in_grpo=False),
                ours(x, grpo_advantages, divides=False),
            ),
        ),
        Pair(
            "RLOO's advantages",
            f"{CORE}: compute_rloo_outcome_advantage",
            "rloo_advantages",
            lambda x: Sides(of_groups(x, "rloo"), ours(x, rloo_advantages)),
        ),
        Pair(
            "REINFORCE++'s advantages",
            f"{CORE}: compute_reinforce_plus_plus_outcome_advantage",
            "reinforce_pp_advantages, whiten",
            lambda x: Sides(their_reinforce(x), our_reinforce(x, is_sample=False)),
            N_MINUS_1,
            lambda x: Sides(their_reinforce(x), our_reinforce(x, is_sample=True)),
        ),
    ]
