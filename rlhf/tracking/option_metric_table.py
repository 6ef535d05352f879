"""The metrics of DPO, and those that options of PPO bring; the rest are in ``metric_table``."""

from __future__ import annotations

from rlhf.tracking.metric_table import MetricInfo

DPO = {
    "dpo/loss": MetricInfo(
        "nats per pair",
        "mean of -log sigmoid(margin) over pairs, smoothed by `dpo.label_smoothing`",
        "starts at ln 2 = 0.69 and falls",
        "flat: `dpo.lr` too low; falls to 0: pairs are learnt by heart, use fewer `dpo.epochs`",
    ),
    "dpo/accuracy": MetricInfo(
        "share",
        "pairs whose chosen response has the larger implicit reward",
        "rises from 0.5 towards dpo/eval_accuracy",
        "stays at 0.5: nothing is learnt; 1: see dpo/loss",
    ),
    "dpo/margin": MetricInfo(
        "reward",
        "implicit reward of the chosen response less that of the rejected one",
        "rises",
        "beyond 10: the policy has left its reference, raise `dpo.beta`",
    ),
    "dpo/chosen_reward": MetricInfo(
        "reward",
        "`dpo.beta` * (log p - log p of the reference) of the chosen response",
        "near 0 or falling slower than dpo/rejected_reward",
        "far below 0: chosen responses lose probability too, lower `dpo.lr` or raise `dpo.beta`",
    ),
    "dpo/rejected_reward": MetricInfo(
        "reward",
        "the same of the rejected response",
        "falls",
        "rises with dpo/chosen_reward: only the form is learnt; see dpo/margin",
    ),
    "dpo/learning_rate": MetricInfo(
        "1",
        "learning rate of the last optimiser step",
        "rises over `dpo.warmup_steps`, then follows `dpo.lr_schedule`",
        "0 throughout: the warm-up is longer than the phase",
    ),
    "dpo/grad_norm": MetricInfo(
        "1",
        "norm of the whole gradient before clipping",
        "steady",
        "growing: lower `dpo.lr`",
    ),
    "dpo/pairs_per_second": MetricInfo(
        "pairs/s",
        "pairs of the batch over the step's seconds, all ranks together",
        "constant after the first steps",
        "falling: another process shares the machine",
    ),
    "dpo/eval_accuracy": MetricInfo(
        "share",
        "dpo/accuracy on held-out pairs",
        "rises above 0.5 and stays a little below dpo/accuracy",
        "far below dpo/accuracy: overfitting, use fewer `dpo.epochs`",
    ),
    "dpo/eval_loss": MetricInfo(
        "nats per pair",
        "dpo/loss on held-out pairs",
        "falls with dpo/loss",
        "rises while dpo/loss falls: overfitting, use fewer `dpo.epochs`",
    ),
}

PPO_OPTIONS = {
    "ppo/eval_score": MetricInfo(
        "score",
        "mean score of answers to held-out prompts, every `ppo.eval_every` steps",
        "rises with ppo/score_mean",
        "falls while ppo/score_mean rises: training prompts are learnt by heart",
    ),
    "ppo/eval_gold": MetricInfo(
        "share",
        "mean gold score of these answers, where the data set knows it",
        "rises with ppo/eval_score",
        "falls while ppo/eval_score rises: the reward model is exploited, raise `ppo.kl_ctl`",
    ),
    "ppo/eval_kl": MetricInfo(
        "nats per sequence",
        "KL(policy || reference) of these answers, k1",
        "follows ppo/kl_to_reference",
        "see ppo/kl_to_reference",
    ),
    "ppo/eval_ended_share": MetricInfo(
        "share",
        "these answers that ended by themselves",
        "follows ppo/ended_share",
        "see ppo/ended_share",
    ),
    "ppo/eval_response_tokens": MetricInfo(
        "tokens",
        "mean length of these answers",
        "follows ppo/response_tokens",
        "see ppo/response_tokens",
    ),
    "ppo/eval_exact": MetricInfo(
        "share",
        "these answers that are exactly right, where the data set knows it",
        "rises with ppo/eval_score",
        "falls while ppo/eval_score rises: the reward model is exploited, raise `ppo.kl_ctl`",
    ),
    "ppo/eval_exact_greedy": MetricInfo(
        "share",
        "held-out prompts that are answered exactly right by the likeliest tokens",
        "does not fall",
        "falls: the reward model is exploited, raise `ppo.kl_ctl`",
    ),
    "ppo/eval_correct": MetricInfo(
        "share",
        "part *correct* of the gold score of these answers",
        "rises with ppo/eval_gold",
        "flat while ppo/eval_gold rises: only manners are learnt",
    ),
    "ppo/eval_polite": MetricInfo(
        "share",
        "part *polite* of the gold score of these answers",
        "rises towards 1",
        "flat: the reward model does not see manners",
    ),
    "ppo/eval_stops": MetricInfo(
        "share",
        "part *stops* of the gold score of these answers",
        "rises towards 1",
        "falls: answers ramble, or never end",
    ),
    "ppo/ptx_loss": MetricInfo(
        "nats per token",
        "language-model loss on the corpus of `ppo.ptx_coef`",
        "stays where it starts, or falls slowly",
        "rises: the corpus is forgotten, raise `ppo.ptx_coef` or `ppo.ptx_batch_size`",
    ),
    "ppo/kl_loss": MetricInfo(
        "nats per token",
        "KL(policy || reference) in the loss, where `ppo.kl_placement` is loss",
        "follows ppo/kl_per_token",
        "grows without end: raise `ppo.kl_ctl`",
    ),
    "ppo/dual_clipfrac": MetricInfo(
        "share",
        "response tokens whose loss `ppo.dual_clip` holds; 0 where it is null",
        "below 0.01",
        "above: the policy moves too far in one step, lower `ppo.actor_lr`",
    ),
    "ppo/lr_scale": MetricInfo(
        "1",
        "what `ppo.lr_guard_kl` multiplies the actor's learning rate by",
        "1, or falling for a while after large steps",
        "at its floor of 0.001: `ppo.actor_lr` is far too high for the guard",
    ),
    "rollout/accelerated_layers": MetricInfo(
        "layers",
        "layers in whose place DeepSpeed's Hybrid Engine has put its own, with "
        "`rollout=hybrid_engine`",
        "the model's layers",
        "fewer: the others are transformers' own; with 0 no run starts",
    ),
    "ppo/updates": MetricInfo(
        "steps",
        "optimiser steps taken on the rollout",
        "`ppo.ppo_epochs` * rollout_batch_size / mini_batch_size",
        "fewer: `ppo.stop_update_kl` ended them early",
    ),
    "ppo/actor_overflows": MetricInfo(
        "steps",
        "optimiser steps at which the actor's fp16 gradients overflowed",
        "0, or one now and then",
        "every step: the loss scale finds no footing, use bf16",
    ),
    "ppo/critic_overflows": MetricInfo(
        "steps",
        "the same of the critic",
        "0, or one now and then",
        "every step: the loss scale finds no footing, use bf16",
    ),
}
