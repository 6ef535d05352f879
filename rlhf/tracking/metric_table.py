"""Every metric that a phase may log: unit, formula, and how to read it.

``docs/metrics.md`` is made from this table. Logs are natural: a nat is 1.44 bits.
"""

from __future__ import annotations

from typing import NamedTuple


class MetricInfo(NamedTuple):
    """What one logged number is and how it should look."""

    unit: str
    meaning: str
    healthy: str
    otherwise: str


SFT = {
    "sft/loss": MetricInfo(
        "nats per token",
        "mean of -log p(token) over the trained tokens of the batch",
        "falls fast, then slowly; starts near ln(vocabulary) from random weights",
        "flat: learning rate too low; rises: too high; near 0: examples are learnt by heart",
    ),
    "sft/learning_rate": MetricInfo(
        "1",
        "learning rate of the last optimiser step",
        "rises over `sft.warmup_steps`, then follows `sft.lr_schedule`",
        "0 throughout: `sft.lr` is 0 or the warm-up is longer than the phase",
    ),
    "sft/grad_norm": MetricInfo(
        "1",
        "norm of the whole gradient before clipping",
        "steady, mostly within ten times `sft.max_grad_norm`",
        "single spikes: odd batches, clipping takes care; growing: lower `sft.lr`; 0: no token is "
        "trained",
    ),
    "sft/tokens_per_second": MetricInfo(
        "tokens/s",
        "tokens of the batch, padding not counted, over the step's seconds, all ranks together",
        "constant after the first steps",
        "falling: another process shares the machine, or data loading is the limit",
    ),
    "sft/eval_loss": MetricInfo(
        "nats per token",
        "the loss on held-out examples, weighted by tokens",
        "falls with sft/loss and stays a little above it",
        "rises while sft/loss falls: overfitting, use fewer `sft.epochs`",
    ),
    "sft/eval_perplexity": MetricInfo(
        "1",
        "exp(sft/eval_loss)",
        "far below the vocabulary size; comparable only between equal tokenizers",
        "near the vocabulary size: nothing was learnt; near 1: held-out text was trained on",
    ),
}

REWARD = {
    "reward/loss": MetricInfo(
        "nats per pair",
        "mean of -log sigmoid(chosen score - rejected score)",
        "starts near ln 2 = 0.693, falls below it",
        "stays at 0.693: guessing; above 1: confidently wrong, lower `reward.lr`",
    ),
    "reward/accuracy": MetricInfo(
        "share",
        "pairs of the batch whose chosen response scores higher",
        "from 0.5 to 0.6-0.8 on human preferences",
        "0.5: nothing learnt; below 0.5: chosen and rejected may be swapped in the data",
    ),
    "reward/margin": MetricInfo(
        "score",
        "mean of chosen score - rejected score",
        "grows from 0 to a few units",
        "grows on while reward/eval_accuracy does not: overconfident, train less",
    ),
    "reward/chosen_score": MetricInfo(
        "score",
        "mean score of chosen responses",
        "above reward/rejected_score; the common level is arbitrary",
        "drifts far from 0 together with the rejected score: `ppo.clip_reward_value` will cut it",
    ),
    "reward/rejected_score": MetricInfo(
        "score",
        "mean score of rejected responses",
        "below reward/chosen_score",
        "equal to it: the model does not tell the two apart",
    ),
    "reward/learning_rate": MetricInfo(
        "1",
        "learning rate of the last optimiser step",
        "rises over `reward.warmup_steps`, then follows `reward.lr_schedule`",
        "0 throughout: `reward.lr` is 0 or the warm-up is longer than the phase",
    ),
    "reward/grad_norm": MetricInfo(
        "1",
        "norm of the whole gradient before clipping",
        "large at first, since the head is new, then steady",
        "growing: lower `reward.lr`; 0: both responses of the pairs are the same",
    ),
    "reward/pairs_per_second": MetricInfo(
        "pairs/s",
        "pairs of the batch over the step's seconds, all ranks together",
        "constant after the first steps",
        "falling: another process shares the machine, or data loading is the limit",
    ),
    "reward/eval_accuracy": MetricInfo(
        "share",
        "held-out pairs whose chosen response scores higher",
        "close to reward/accuracy; annotators agree in about 0.7-0.8 of pairs",
        "well below reward/accuracy: overfitting; near 1 on human data: a leak, or length tells",
    ),
    "reward/eval_one_item_wrong": MetricInfo(
        "share",
        "right answers that score higher than themselves with one item replaced; synthetic task",
        "above 0.9",
        "near 0.5: the reward model does not see correctness, and PPO will not improve it",
    ),
    "reward/eval_one_item_too_many": MetricInfo(
        "share",
        "right answers that score higher than themselves with one item more; synthetic task",
        "above 0.9",
        "below 0.5: PPO will learn to add items",
    ),
    "reward/eval_one_item_missing": MetricInfo(
        "share",
        "right answers that score higher than themselves with one item less; synthetic task",
        "above 0.9",
        "below 0.5: PPO will learn to leave items out",
    ),
    "reward/eval_loss": MetricInfo(
        "nats per pair",
        "the loss on held-out pairs",
        "below ln 2 = 0.693",
        "rises while accuracy holds: scores are overconfident, use fewer `reward.epochs`",
    ),
    "reward/eval_chosen_score": MetricInfo(
        "score",
        "mean score of held-out chosen responses",
        "close to reward/chosen_score",
        "far from it: overfitting, use fewer `reward.epochs`",
    ),
    "reward/eval_rejected_score": MetricInfo(
        "score",
        "mean score of held-out rejected responses",
        "below reward/eval_chosen_score",
        "equal to it: the model does not tell held-out responses apart",
    ),
}

TIMES = {
    "time/generate_seconds": MetricInfo(
        "s",
        "sampling the responses of one step",
        "the largest of the three parts, often more than half of a step",
        "grows: responses grow, see ppo/response_tokens",
    ),
    "time/score_seconds": MetricInfo(
        "s",
        "log-probabilities, values and scores of the responses of one step",
        "less than time/train_seconds: forward passes only",
        "more than it: `hardware.max_micro_batch_size` is too small, or models are offloaded",
    ),
    "time/train_seconds": MetricInfo(
        "s",
        "the optimiser steps of actor and critic in one step",
        "constant; proportional to `ppo.ppo_epochs`",
        "grows: responses grow; jumps: the machine is shared or swaps",
    ),
    "time/step_seconds": MetricInfo(
        "s",
        "one whole step: generate, score, train and the rest",
        "close to the sum of the three parts",
        "well above their sum: logging, saving or waiting for other ranks takes the time",
    ),
    "speed/tokens_per_second": MetricInfo(
        "tokens/s",
        "prompt and response tokens of one step, padding not counted, over time/step_seconds, all "
        "ranks together",
        "constant after the first steps",
        "falling at constant ppo/response_tokens: another process shares the machine",
    ),
    "speed/generate_tflops": MetricInfo(
        "10^12 operations/s",
        "operations of the model in sampling (each token through the actor once), over "
        "time/generate_seconds, all ranks together; padding does not count",
        "constant",
        "falling: another process shares the machine",
    ),
    "speed/generate_mfu": MetricInfo(
        "share",
        "model FLOP utilisation: speed/generate_tflops over the peak of all ranks "
        "(`hardware.peak_tflops`; on a CPU the measured rate of large products)",
        "below 0.1: decoding waits for memory",
        "far below: raise `ppo.rollout_batch_size`",
    ),
    "speed/score_tflops": MetricInfo(
        "10^12 operations/s",
        "operations of the forward passes that score, over time/score_seconds, all ranks together",
        "constant",
        "falling: another process shares the machine",
    ),
    "speed/score_mfu": MetricInfo(
        "share",
        "the same over the peak of all ranks",
        "0.3 to 0.5 with a billion weights, less with small models",
        "lower: raise `hardware.max_micro_batch_size`",
    ),
    "speed/train_tflops": MetricInfo(
        "10^12 operations/s",
        "operations of the forward and backward passes of actor and critic, over "
        "time/train_seconds, all ranks together; what gradient checkpointing computes again does "
        "not count",
        "constant",
        "falling: another process shares the machine",
    ),
    "speed/train_mfu": MetricInfo(
        "share",
        "the same over the peak of all ranks",
        "0.3 to 0.5 with a billion weights, less with small models",
        "lower: raise `hardware.max_micro_batch_size`, or leave out gradient checkpointing",
    ),
    "memory/peak_gib": MetricInfo(
        "GiB",
        "most memory that any rank has held so far: of its GPU, or of its process on a CPU",
        "constant after the first steps",
        "grows: something is kept from step to step",
    ),
}
