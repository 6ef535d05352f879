"""The metrics of PPO: unit, formula, how to read them; the rest are in ``metric_table``."""

from __future__ import annotations

from rlhf.tracking.metric_table import MetricInfo

SCORES = {
    "ppo/score_mean": MetricInfo(
        "score",
        "mean score of the step's responses, as the reward model gave it",
        "rises, then levels off",
        "flat: raise `ppo.actor_lr` or lower `ppo.kl_ctl`; rises while gold scores or samples get "
        "worse: the reward model is being exploited, raise `ppo.kl_ctl`",
    ),
    "ppo/score_average": MetricInfo(
        "score",
        "exponential average of ppo/score_mean over steps: nine tenths of the last one, one tenth "
        "of this step's",
        "rises smoothly, then levels off",
        "see ppo/score_mean, whose noise it leaves out",
    ),
    "ppo/score_std": MetricInfo(
        "score",
        "standard deviation of the scores over the step's responses",
        "shrinks slowly while the mean rises",
        "near 0: all responses score alike, nothing is left to learn from; see ppo/entropy",
    ),
    "ppo/reward_mean": MetricInfo(
        "reward",
        "mean over sequences of their summed shaped rewards: clipped score, less the penalty for a "
        "missing end, less kl_ctl * KL",
        "rises; it is what PPO maximises",
        "falls while ppo/score_mean rises: the KL penalty outweighs the gain",
    ),
    "ppo/reward_std": MetricInfo(
        "reward",
        "standard deviation over sequences of their summed shaped rewards",
        "of the order of ppo/score_std",
        "far above it: a few sequences pay a huge KL penalty; below: `ppo.clip_reward_value` cuts",
    ),
}

DIVERGENCE = {
    "ppo/kl_to_reference": MetricInfo(
        "nats per sequence",
        "k1 estimate of KL(policy || reference): mean over sequences of the sum of "
        "log p - log p_reference",
        "starts near 0, grows to 1-30, held by `ppo.kl_target` where that is set",
        "runs away: raise `ppo.kl_ctl` or lower `ppo.actor_lr`; clearly negative: responses are "
        "not samples of the scored policy (`rollout.top_k`, `rollout.top_p`, temperature)",
    ),
    "ppo/kl_to_reference_k3": MetricInfo(
        "nats per sequence",
        "the same by k3, mean over sequences of the sum of r - 1 - log r with r = p_reference / p: "
        "less noise, never negative",
        "close to ppo/kl_to_reference",
        "far above it: single tokens that the reference finds likely have become rare",
    ),
    "ppo/kl_per_token": MetricInfo(
        "nats per token",
        "the same sum over all response tokens, divided by their number",
        "below about 0.3",
        "grows while kl_to_reference holds: responses get shorter and stray further per token",
    ),
    "ppo/logprob_mismatch": MetricInfo(
        "nats per token",
        "mean |log p of the rollout - log p of training's forward pass| of the same weights; only "
        "where the rollout backend measures log-probabilities",
        "1e-6 in fp32, about 0.01 in bf16",
        "above `rollout.max_logprob_mismatch`: log-probabilities are recomputed in every step; "
        "far above it: the rollout samples from another policy (`rollout.top_k`, `rollout.top_p`, "
        "dropout)",
    ),
    "ppo/logprob_mismatch_share": MetricInfo(
        "share",
        "response tokens for which the two differ by more than 0.1 nats",
        "0 in fp32, below 0.05 in bf16",
        "see ppo/logprob_mismatch",
    ),
    "ppo/logprob_mismatch_max": MetricInfo(
        "nats",
        "the largest difference of any response token",
        "1e-4 in fp32, below 1 in bf16",
        "above 2: some tokens come from another policy, or rare tokens meet a low precision",
    ),
    "ppo/kl_ctl": MetricInfo(
        "reward per nat",
        "coefficient of the KL penalty used in this step",
        "constant without `ppo.kl_target`; with it, settles",
        "keeps growing: the target is out of reach, lower `ppo.actor_lr`; sinks towards 0: the "
        "target is too wide",
    ),
    "ppo/clipfrac": MetricInfo(
        "share",
        "response tokens whose policy ratio the clip held, over all optimiser steps",
        "up to 0.2; in the default run 0.001 to 0.01, and less as the learning rate falls; 0 with "
        "one optimiser step per response",
        "above 0.3: steps are too large, lower `ppo.actor_lr` or `ppo.ppo_epochs`; always 0 with "
        "several optimiser steps: too small",
    ),
    "ppo/approx_kl": MetricInfo(
        "nats per token",
        "k3 estimate of KL(old || new): mean of ratio - 1 - log ratio over response tokens",
        "below 0.02; never negative",
        "above 0.1: the policy leaves its own samples behind, lower `ppo.actor_lr` or "
        "`ppo.ppo_epochs`",
    ),
    "ppo/ratio_mean": MetricInfo(
        "1",
        "mean ratio p_new / p_old over response tokens, over all optimiser steps",
        "within 0.01 of 1",
        "away from 1: the old log-probabilities are not those of the sampled policy, see "
        "ppo/logprob_mismatch",
    ),
    "ppo/ratio_max": MetricInfo(
        "1",
        "largest ratio p_new / p_old of any response token",
        "1-3",
        "above 10 now and then: rare tokens, clipped; always: rollout and training disagree on "
        "log-probabilities (precision, dropout)",
    ),
    "ppo/entropy": MetricInfo(
        "nats per token",
        "mean of -sum_v p(v) log p(v) over response tokens",
        "falls slowly",
        "near 0: the policy has collapsed to one answer, raise `ppo.kl_ctl`; rises steadily: it is "
        "turning into noise, lower `ppo.actor_lr`",
    ),
}

LOSSES = {
    "ppo/actor_loss": MetricInfo(
        "advantage per token",
        "mean of max(-A * ratio, -A * clip(ratio)) over response tokens",
        "close to 0; its size says little, since advantages are whitened",
        "far from 0 or jumping: see ppo/ratio_max and ppo/clipfrac",
    ),
    "ppo/critic_loss": MetricInfo(
        "reward squared per token",
        "mean of 0.5 * max((V - R)^2, (clipped V - R)^2) over response tokens",
        "falls over the first steps, then follows the variance of returns",
        "grows: raise `ppo.critic_lr`, or rewards are unbounded, lower `ppo.clip_reward_value`",
    ),
    "ppo/value_error": MetricInfo(
        "reward squared per token",
        "mean of (V - R)^2 over response tokens, before training",
        "falls below the square of ppo/returns_std",
        "stays there: see ppo/explained_variance",
    ),
    "ppo/value_clipfrac": MetricInfo(
        "share",
        "response tokens whose clipped value error is the larger one",
        "below 0.3; 0 where `ppo.cliprange_value` is null",
        "above 0.5: the critic is held back, raise `ppo.cliprange_value`",
    ),
    "ppo/values_mean": MetricInfo(
        "reward",
        "mean of the critic's values over response tokens, before training",
        "follows ppo/returns_mean after a few steps",
        "stays away from it: the critic does not learn, raise `ppo.critic_lr`",
    ),
    "ppo/values_std": MetricInfo(
        "reward",
        "standard deviation of the values over response tokens",
        "below ppo/returns_std, and above 0",
        "near 0: the critic predicts one number; above returns_std: it is noisy",
    ),
    "ppo/values_min": MetricInfo(
        "reward",
        "smallest value of any response token",
        "within the range of the returns",
        "far outside it: the critic meets states that it has not learnt",
    ),
    "ppo/values_max": MetricInfo(
        "reward",
        "largest value of any response token",
        "within the range of the returns",
        "see ppo/values_min",
    ),
    "ppo/returns_mean": MetricInfo(
        "reward",
        "mean of R_t = A_t + V_t over response tokens",
        "rises with ppo/reward_mean",
        "falls: see ppo/reward_mean",
    ),
    "ppo/returns_std": MetricInfo(
        "reward",
        "standard deviation of R_t over response tokens",
        "of the order of ppo/reward_std",
        "far above it: values are extreme, see ppo/values_std",
    ),
    "ppo/returns_min": MetricInfo(
        "reward",
        "smallest R_t of any response token",
        "above minus `ppo.clip_reward_value` less the KL penalty",
        "far below: one sequence pays a huge KL penalty",
    ),
    "ppo/returns_max": MetricInfo(
        "reward",
        "largest R_t of any response token",
        "up to about `ppo.clip_reward_value`",
        "far above: values are extreme, see ppo/values_max",
    ),
    "ppo/advantages_mean": MetricInfo(
        "reward",
        "mean of A_t over response tokens, before whitening",
        "close to 0",
        "positive (negative) on end: the critic guesses too low (high), see ppo/explained_variance",
    ),
    "ppo/advantages_std": MetricInfo(
        "reward",
        "standard deviation of A_t over response tokens, before whitening",
        "shrinks while the critic learns",
        "near 0: whitening blows up noise, there is nothing left to learn; grows: the critic "
        "loses track",
    ),
    "ppo/explained_variance": MetricInfo(
        "1",
        "1 - Var(R - V) / Var(R) over response tokens; 1 is perfect, 0 as good as a constant",
        "rises from below 0 to 0.3-0.9",
        "stays at or below 0: the critic does not help, raise `ppo.critic_lr` or warm it up",
    ),
}

ROLLOUT = {
    "ppo/response_tokens": MetricInfo(
        "tokens",
        "mean length of a response, its end token included",
        "changes slowly, below `rollout.max_response_tokens`",
        "grows to the limit: the reward model likes length, or ends are unlearnt; falls to 1: the "
        "policy escapes the KL penalty by saying nothing, lower `ppo.kl_ctl`",
    ),
    "ppo/ended_share": MetricInfo(
        "share",
        "responses that end by themselves, within `rollout.max_response_tokens`",
        "above 0.9",
        "low: raise `rollout.max_response_tokens` or `ppo.missing_end_penalty`; 0 from the start: "
        "the SFT model never learnt to end",
    ),
    "ppo/actor_learning_rate": MetricInfo(
        "1",
        "the actor's learning rate in the last optimiser step",
        "rises over `ppo.warmup_steps`, then follows `ppo.lr_schedule`",
        "0 throughout: `ppo.actor_lr` is 0 or the warm-up is longer than the phase",
    ),
    "ppo/critic_learning_rate": MetricInfo(
        "1",
        "the critic's learning rate in the last optimiser step",
        "as the actor's, from `ppo.critic_lr`; usually the larger",
        "0 throughout: `ppo.critic_lr` is 0 or the warm-up is longer than the phase",
    ),
    "ppo/actor_grad_norm": MetricInfo(
        "1",
        "norm of the actor's gradient before clipping, mean over optimiser steps",
        "steady",
        "growing: lower `ppo.actor_lr`; near 0: all advantages vanish, see ppo/score_std",
    ),
    "ppo/critic_grad_norm": MetricInfo(
        "1",
        "norm of the critic's gradient before clipping, mean over optimiser steps",
        "large at first, then steady",
        "growing: lower `ppo.critic_lr` or `ppo.clip_reward_value`",
    ),
    "ppo/skipped_steps": MetricInfo(
        "optimiser steps",
        "the actor's and the critic's optimiser steps that were skipped in this step, as the "
        "gradient overflowed",
        "0; with fp16 a few at the start, while the loss scale is found",
        "more on end: use `hardware.dtype=bf16`",
    ),
}
