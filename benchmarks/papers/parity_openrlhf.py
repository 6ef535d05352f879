"""Comparisons with OpenRLHF. Shapes as in ``parity_sides``."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from papers.parity_openrlhf_advantages import MAKER, advantage_pairs
from papers.parity_sides import (
    BETA,
    CLIPS,
    DUAL,
    HIGH,
    LOW,
    ROWS,
    SMOOTHING,
    VALUE_CLIP,
    Inputs,
    Pair,
    Sides,
    Tensors,
    far_kl,
    graded,
    our_dpo,
    our_kl,
    our_pairs,
    our_policy,
    our_value,
    pair_logprobs,
)
from papers.peer_wheels import Wheels
from rlhf.algorithms.ppo import gspo_loss
from rlhf.algorithms.sft import sft_loss
from rlhf.config.schema.ppo import LossAggregation

LOSS = "openrlhf/models/loss.py"
UTILS = "openrlhf/models/utils.py"


def pairs(wheels: Wheels) -> list[Pair]:
    """Return all comparisons."""
    utils = wheels.load("OpenRLHF", UTILS, "compute_approx_kl compute_reward masked_mean")
    names = "aggregate_loss SFTLoss PolicyLoss ValueLoss PairWiseLoss DPOLoss"
    losses = wheels.load("OpenRLHF", LOSS, names, {"masked_mean": utils.masked_mean})
    names = "compute_advantages_and_returns get_advantages_and_returns get_cumulative_returns"
    maker = wheels.load(
        "OpenRLHF",
        MAKER,
        " ".join(f"RemoteExperienceMaker.{name}" for name in names.split()),
        {"compute_reward": utils.compute_reward, "apply_length_penalties": lambda *_: None},
    )
    return [*_policy(losses), *_kl(utils), *advantage_pairs(maker), *_pairs(losses)]


def _policy(losses: SimpleNamespace) -> list[Pair]:
    def theirs(
        x: Inputs, *, advantages_BT: Tensor | None = None, **keys: float | bool | str
    ) -> Tensors:
        loss = losses.PolicyLoss(LOW, HIGH, **keys)
        given_BT = x.advantages_BT if advantages_BT is None else advantages_BT
        keep_BT = x.keep_BT.double()
        return graded(lambda at: loss(at, x.old_BT, given_BT, keep_BT)[0], x.logprobs_BT)

    def value(x: Inputs) -> Tensors:
        loss = losses.ValueLoss(VALUE_CLIP)
        return graded(
            lambda at: loss(at, x.old_values_BT, x.returns_BT, x.keep_BT.double()), x.values_BT
        )

    sequence = LossAggregation.sequence_mean
    where = f"{LOSS}: PolicyLoss"
    return [
        Pair(
            "policy loss, clipped",
            where,
            "policy_loss",
            lambda x: Sides(theirs(x), our_policy(x, **CLIPS)),
        ),
        Pair(
            "policy loss, dual clip",
            where,
            "policy_loss",
            lambda x: Sides(theirs(x, dual_clip=DUAL), our_policy(x, dual_clip=DUAL, **CLIPS)),
        ),
        Pair(
            "policy loss, mean of sequence means",
            where,
            "policy_loss",
            lambda x: Sides(
                theirs(x, token_level_loss=False), our_policy(x, how=sequence, **CLIPS)
            ),
        ),
        Pair(
            "GSPO, one advantage for each response",
            where,
            "gspo_loss",
            lambda x: Sides(
                theirs(x, policy_loss_type="gspo", advantages_BT=x.spread_BT),
                our_policy(x, gspo_loss, how=sequence, advantages_BT=x.spread_BT, **CLIPS),
            ),
        ),
        Pair(
            "value loss, clipped",
            f"{LOSS}: ValueLoss",
            "value_loss",
            lambda x: Sides(value(x), our_value(x)),
        ),
    ]


def _kl(utils: SimpleNamespace) -> list[Pair]:
    def theirs(x: Inputs, name: str, reference_BT: Tensor) -> Tensors:
        return graded(
            lambda at: utils.compute_approx_kl(at, reference_BT, kl_estimator=name), x.logprobs_BT
        )

    where = f"{UTILS}: compute_approx_kl"
    return [
        *(
            Pair(
                f"KL estimator {name}",
                where,
                "estimate_kl",
                lambda x, name=name: Sides(theirs(x, name, x.reference_BT), our_kl(x, name)),
            )
            for name in ("k1", "k2", "k3")
        ),
        *(
            Pair(
                f"KL estimator {name}, far from the reference",
                where,
                "estimate_kl",
                lambda x, name=name: Sides(theirs(x, name, x.far_BT), far_kl(x, name)),
                "values beyond -10 and 10 are cut to them, and have no gradient (here: neither)",
                lambda x, name=name: Sides(
                    theirs(x, name, x.far_BT), far_kl(x, name, low=-10.0, high=10.0)
                ),
            )
            for name in ("k1", "k2", "k3")
        ),
    ]


def _pairs(losses: SimpleNamespace) -> list[Pair]:
    def theirs_dpo(x: Inputs, **keys: float | bool) -> Tensors:
        loss, (chosen_B, *others) = losses.DPOLoss(BETA, **keys), pair_logprobs(x)
        return graded(lambda at: loss(at, *others)[0], chosen_B)

    def theirs_pairs(x: Inputs) -> Tensors:
        half = ROWS // 2
        rejected_B, margins_B = x.scores_B[half:], x.margins_B[half:]
        loss = losses.PairWiseLoss()
        return graded(lambda at: loss(at, rejected_B, margins_B), x.scores_B[:half])

    def theirs_sft(x: Inputs) -> Tensors:
        return graded(lambda at: losses.SFTLoss()(at, x.keep_BT.double()), x.logprobs_BT)

    def our_sft(x: Inputs) -> Tensors:
        return graded(lambda at: sft_loss(at[x.keep_BT]).loss / x.keep_BT.sum(), x.logprobs_BT)

    return [
        Pair(
            "reward model's pair loss, with margins",
            f"{LOSS}: PairWiseLoss",
            "end_loss",
            lambda x: Sides(theirs_pairs(x), our_pairs(x)),
        ),
        Pair(
            "DPO, label smoothing",
            f"{LOSS}: DPOLoss",
            "dpo_loss",
            lambda x: Sides(
                theirs_dpo(x, label_smoothing=SMOOTHING), our_dpo(x, label_smoothing=SMOOTHING)
            ),
        ),
        Pair(
            "IPO",
            f"{LOSS}: DPOLoss",
            "dpo_loss",
            lambda x: Sides(theirs_dpo(x, ipo=True), our_dpo(x, loss="ipo")),
        ),
        Pair(
            "SFT, mean over tokens",
            f"{LOSS}: SFTLoss",
            "sft_loss",
            lambda x: Sides(theirs_sft(x), our_sft(x)),
        ),
    ]
