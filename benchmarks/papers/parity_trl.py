"""Comparisons with TRL. Shapes as in ``parity_sides``.

TRL's losses are methods of its trainers: they run whole, with an object in the place of the trainer
that has what they read, and log-probs in the place of a model's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from papers.parity_sides import (
    BETA,
    CLIPS,
    DUAL,
    HIGH,
    KL_COEF,
    LONGEST,
    LOW,
    ROWS,
    WIDTH,
    Inputs,
    Pair,
    Sides,
    Tensors,
    graded,
    our_dpo,
    our_pairs,
    our_policy,
    pair_logprobs,
)
from papers.peer_wheels import Wheels
from rlhf.algorithms.dpo import dpo_loss
from rlhf.algorithms.ppo import cispo_loss, gspo_loss, policy_loss
from rlhf.config.schema.ppo import LossAggregation

GRPO = "trl/trainer/grpo_trainer.py"
RLOO = "trl/trainer/rloo_trainer.py"
DPO = "trl/trainer/dpo_trainer.py"
REWARD = "trl/trainer/reward_trainer.py"


def pairs(wheels: Wheels) -> list[Pair]:
    """Return all comparisons."""
    utils = vars(wheels.load("TRL", "trl/trainer/utils.py", "nanmin nanmax"))
    given = {**utils, "F": nn.functional, "nn": nn}
    grpo = wheels.load("TRL", GRPO, "GRPOTrainer._compute_loss", given)._compute_loss
    rloo = wheels.load("TRL", RLOO, "RLOOTrainer._compute_loss", given)._compute_loss
    dpo = wheels.load("TRL", DPO, "DPOTrainer._compute_loss", given)._compute_loss
    reward = wheels.load("TRL", REWARD, "RewardTrainer.compute_loss", given).compute_loss
    return [*_grpo(grpo), _rloo(rloo), *_dpo(dpo), _reward(reward)]


def _trainer(**state: object) -> SimpleNamespace:
    """Return what the losses read of a trainer on one process."""
    accelerator = SimpleNamespace(
        num_processes=1,
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,  # noqa: ARG005
    )
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **state,
    )


def _completions(x: Inputs) -> dict[str, Tensor]:
    """Return the inputs of a policy loss."""
    zeros = torch.zeros((ROWS, WIDTH), dtype=torch.long)
    return {
        "prompt_ids": zeros[:, :1],
        "prompt_mask": zeros[:, :1],
        "completion_ids": zeros,
        "completion_mask": x.keep_BT.double(),
        "advantages": x.row_advantages_B,
        "old_per_token_logps": x.old_BT,
        "old_logps": x.old_BT.masked_fill(~x.keep_BT, 0.0).sum(dim=1),
        "ref_per_token_logps": x.reference_BT,
        "num_items_in_batch": x.keep_BT.sum(),
    }


def _run_model(logprobs_BT: Tensor) -> Callable[..., tuple[Tensor, Tensor, None]]:
    """Return what would run the model: log-probs, entropies, and no auxiliary loss."""
    return lambda *_, **__: (logprobs_BT, torch.zeros_like(logprobs_BT), None)


def _grpo(compute_loss: object) -> list[Pair]:
    def theirs(
        x: Inputs,
        loss_type: str,
        *,
        level: str = "token",
        kl_coef: float = 0.0,
        corrects_kl: bool = True,
        high: float = HIGH,
        delta: float | None = None,
    ) -> Tensors:
        args = SimpleNamespace(
            use_bias_correction_kl=corrects_kl, delta=delta, steps_per_generation=1
        )

        def value(logprobs_BT: Tensor) -> Tensor:
            trainer = _trainer(
                _get_per_token_logps_and_entropies=_run_model(logprobs_BT),
                args=args,
                loss_type=loss_type,
                importance_sampling_level=level,
                beta=kl_coef,
                epsilon_low=LOW,
                epsilon_high=high,
                max_completion_length=LONGEST,
                top_entropy_quantile=1.0,
                off_policy_mask_threshold=None,
                use_vllm=False,
                current_gradient_accumulation_steps=1,
                _entropy_bonus_enabled=False,
            )
            return compute_loss(trainer, None, _completions(x))

        return graded(value, x.logprobs_BT)

    def ours(x: Inputs, loss: object = policy_loss, **keys: object) -> Tensors:
        clips = {"cliprange_high": HIGH} if loss is cispo_loss else CLIPS
        return our_policy(x, loss, advantages_BT=x.spread_BT, **{**clips, **keys})

    sequence, fixed = LossAggregation.sequence_mean, LossAggregation.fixed_length
    where = f"{GRPO}: _compute_loss"
    with_kl = {"kl_coef": KL_COEF}
    corrected = {**with_kl, "estimator": "k3_ratio"}
    uncorrected = {**with_kl, "corrects_kl": False}
    same = {  # the loss_type, what else TRL is told, and what we are told
        "GRPO, with k3 times the ratio in the loss, mean of sequence means": (
            "grpo",
            with_kl,
            {**corrected, "how": sequence},
        ),
        "GRPO, with k3 times the ratio in the loss, mean over tokens": ("dapo", with_kl, corrected),
        "GRPO, with k3 in the loss, mean of sequence means": (
            "grpo",
            uncorrected,
            {**with_kl, "how": sequence},
        ),
        "GRPO, with k3 in the loss, mean over tokens": ("dapo", uncorrected, with_kl),
        "GRPO, mean over tokens of a micro-batch": ("bnpo", {}, {}),
        "policy loss, Dr. GRPO's divisor": ("dr_grpo", {}, {"how": fixed}),
        "GRPO, dual clip (TRL: delta)": (
            "grpo",
            {"delta": DUAL},
            {"dual_clip": DUAL, "how": sequence},
        ),
    }
    found = [
        Pair(
            quantity,
            f"{where}, {name}"
            + (", use_bias_correction_kl=False" if "corrects_kl" in told else ""),
            "policy_loss, estimate_kl" if "kl_coef" in here else "policy_loss",
            lambda x, name=name, told=told, here=here: Sides(
                theirs(x, name, **told), ours(x, **here)
            ),
        )
        for quantity, (name, told, here) in same.items()
    ]
    return [
        *found,
        Pair(
            "GSPO",
            f"{where}, grpo, importance_sampling_level=sequence",
            "gspo_loss",
            lambda x: Sides(theirs(x, "grpo", level="sequence"), ours(x, gspo_loss, how=sequence)),
        ),
        Pair(
            "CISPO",
            f"{where}, cispo",
            "cispo_loss",
            lambda x: Sides(theirs(x, "cispo"), ours(x, cispo_loss)),
            "epsilon_high is the largest ratio itself (here: 1 + ppo.cliprange_high)",
            lambda x: Sides(theirs(x, "cispo", high=1 + HIGH), ours(x, cispo_loss)),
        ),
    ]


def _rloo(compute_loss: object) -> Pair:
    def theirs(x: Inputs) -> Tensors:
        def value(logprobs_BT: Tensor) -> Tensor:
            trainer = _trainer(
                _get_per_token_logps_and_entropies=_run_model(logprobs_BT),
                epsilon_low=LOW,
                epsilon_high=HIGH,
            )
            return compute_loss(trainer, None, _completions(x))

        return graded(value, x.logprobs_BT)

    def whole(x: Inputs) -> Tensors:
        """One action per response, with the sum of its log-probs."""

        def value(at: Tensor) -> Tensor:
            new_B1, old_B1 = (
                each_BT.masked_fill(~x.keep_BT, 0.0).sum(dim=1, keepdim=True)
                for each_BT in (at, x.old_BT)
            )
            every_B1 = torch.ones_like(new_B1, dtype=torch.bool)
            given = (new_B1, old_B1, x.row_advantages_B[:, None], every_B1)
            return policy_loss(*given, **CLIPS).loss / ROWS

        return graded(value, x.logprobs_BT)

    return Pair(
        "RLOO, loss",
        f"{RLOO}: _compute_loss",
        "policy_loss",
        lambda x: Sides(theirs(x), our_policy(x, advantages_BT=x.spread_BT, **CLIPS)),
        "a whole response is one action: the ratio of its probabilities is clipped, and the loss is"
        " a mean over responses (here: tokens are actions)",
        lambda x: Sides(theirs(x), whole(x)),
    )


def _dpo(compute_loss: object) -> list[Pair]:
    def theirs(x: Inputs, loss_type: str) -> Tensors:
        mask_BS = torch.nn.functional.pad(x.keep_BT, (1, 0))  # the prompt's token comes first
        _, _, reference_chosen_B, reference_rejected_B = pair_logprobs(x)

        def value(logprobs_BT: Tensor) -> Tensor:
            masked_BT = logprobs_BT.masked_fill(~x.keep_BT, 0.0)
            zeros_BT = torch.zeros_like(masked_BT)
            outputs = SimpleNamespace(
                log_probs=masked_BT, entropy=zeros_BT, mean_logits=zeros_BT, is_top1=x.keep_BT
            )
            trainer = _trainer(
                ld_alpha=None,
                precompute_ref_logps=True,
                f_divergence_type="reverse_kl",
                loss_types=[loss_type],
                loss_weights=[1.0],
                beta=BETA,
                label_smoothing=0.0,
                use_weighting=False,
            )
            inputs = {
                "input_ids": torch.zeros_like(mask_BS, dtype=torch.long),
                "attention_mask": mask_BS,
                "completion_mask": mask_BS.long(),
                "ref_chosen_logps": reference_chosen_B,
                "ref_rejected_logps": reference_rejected_B,
            }
            return compute_loss(trainer, lambda **_: outputs, inputs, False)

        found = graded(value, x.logprobs_BT)
        # All tokens of a response have its gradient; the first half of the rows are chosen.
        return {"value": found["value"], "gradient": found["gradient"][: ROWS // 2, 0]}

    def per_token(x: Inputs) -> Tensors:
        """Each side is divided by the tokens of its response."""
        tokens = 2 * x.keep_BT.sum(dim=1).split(ROWS // 2)  # policy and reference, each
        chosen_B, *others = pair_logprobs(x)

        def value(at: Tensor) -> Tensor:
            sides = [a / b for a, b in zip((at, *others), tokens, strict=True)]
            return dpo_loss(*sides, beta=BETA, loss="ipo").loss / len(at)

        return graded(value, chosen_B)

    where = f"{DPO}: _compute_loss"
    return [
        Pair(
            "DPO",
            f"{where}, sigmoid",
            "dpo_loss",
            lambda x: Sides(theirs(x, "sigmoid"), our_dpo(x)),
        ),
        Pair(
            "IPO",
            f"{where}, ipo",
            "dpo_loss",
            lambda x: Sides(theirs(x, "ipo"), our_dpo(x, loss="ipo")),
            "each side's log-ratio is divided by its number of tokens (the paper's equation 17, and"
            " here: sums)",
            lambda x: Sides(theirs(x, "ipo"), per_token(x)),
        ),
    ]


def _reward(compute_loss: object) -> Pair:
    def theirs(x: Inputs) -> Tensors:
        half = ROWS // 2

        def value(chosen_B: Tensor) -> Tensor:
            logits_B1 = torch.cat([chosen_B, x.scores_B[half:]])[:, None]
            trainer = _trainer(args=SimpleNamespace(center_rewards_coefficient=None))
            inputs = {"margin": x.margins_B[half:], "attention_mask": x.keep_BT}
            return compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits_B1), inputs)

        return graded(value, x.scores_B[:half])

    return Pair(
        "reward model's pair loss, with margins",
        f"{REWARD}: compute_loss",
        "end_loss",
        lambda x: Sides(theirs(x), our_pairs(x)),
    )
