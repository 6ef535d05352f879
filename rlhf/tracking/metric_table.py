"""All metrics that a phase may log: unit, formula, healthy and other values.

``docs/metrics.md`` is generated from these tables. Logarithms are natural: a nat is 1.44 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class MetricInfo(NamedTuple):
    """Documentation of one metric; ``otherwise`` gives causes and fixes of unhealthy values."""

    unit: str
    meaning: str
    healthy: str
    otherwise: str
    healthy_range: tuple[float, float] | None = None  # what ``healthy`` says, if two numbers say it


SFT = {
    "sft/loss": MetricInfo(
        "nats per token",
        "mean of -log p(token) over the trained tokens of the batch",
        "falls fast, then slowly; starts near ln(vocabulary) from random weights",
        "flat: learning rate too low; rises: learning rate too high; near 0: examples are "
        "memorised",
    ),
    "sft/learning_rate": MetricInfo(
        "1",
        "learning rate in the last optimizer step",
        "rises over `sft.warmup_steps`, then follows `sft.lr_schedule`",
        "never reaches `sft.lr`: the warm-up is longer than the phase",
    ),
    "sft/grad_norm": MetricInfo(
        "1",
        "norm of the whole gradient before clipping",
        "steady, mostly within ten times `sft.max_grad_norm`",
        "single spikes: unusual batches, which clipping handles; growing: lower `sft.lr`; 0: no "
        "token is trained",
    ),
    "sft/skipped_steps": MetricInfo(
        "optimizer steps",
        "1 if the optimizer step was skipped because the gradient was not finite, else 0",
        "0; with fp16 a few at the start, until the loss scale is found",
        "above 0 throughout: use `hardware.dtype=bf16`, or lower `sft.lr`",
    ),
    "sft/tokens_per_second": MetricInfo(
        "tokens/s",
        "tokens of the batch without padding, divided by the step's seconds, over all ranks",
        "constant after the first steps",
        "falling: another process uses the machine, or data loading is the bottleneck",
    ),
    "sft/eval_loss": MetricInfo(
        "nats per token",
        "mean loss per token on held-out examples",
        "falls with sft/loss and stays a little above it",
        "rises while sft/loss falls: overfitting, use fewer `sft.epochs`",
    ),
    "sft/eval_perplexity": MetricInfo(
        "1",
        "exp(sft/eval_loss)",
        "far below the vocabulary size; comparable only between runs with the same tokenizer",
        "near the vocabulary size: nothing was learned; near 1: held-out text was trained on",
    ),
}

REWARD = {
    "reward/loss": MetricInfo(
        "nats per pair",
        "mean of -log sigmoid(chosen score - rejected score)",
        "starts near ln 2 = 0.693, then falls",
        "stays at 0.693: the model guesses; above 1: it is confidently wrong, lower `reward.lr`",
    ),
    "reward/accuracy": MetricInfo(
        "share",
        "share of the batch's pairs whose chosen response scores higher",
        "rises from 0.5 to 0.6-0.8 on human preferences",
        "0.5: nothing was learned; below 0.5: chosen and rejected may be swapped in the data",
    ),
    "reward/margin": MetricInfo(
        "score",
        "mean of chosen score - rejected score",
        "grows from 0 to a few units",
        "keeps growing while reward/eval_accuracy does not: the model is overconfident, train less",
    ),
    "reward/chosen_score": MetricInfo(
        "score",
        "mean score of chosen responses",
        "above reward/rejected_score; the absolute level is arbitrary",
        "drifts far from 0 together with the rejected score: `ppo.clip_reward_value` will clip it",
    ),
    "reward/rejected_score": MetricInfo(
        "score",
        "mean score of rejected responses",
        "below reward/chosen_score",
        "equal to reward/chosen_score: the model does not separate the responses",
    ),
    "reward/learning_rate": MetricInfo(
        "1",
        "learning rate in the last optimizer step",
        "rises over `reward.warmup_steps`, then follows `reward.lr_schedule`",
        "never reaches `reward.lr`: the warm-up is longer than the phase",
    ),
    "reward/grad_norm": MetricInfo(
        "1",
        "norm of the whole gradient before clipping",
        "large at first, since the head is new, then steady",
        "growing: lower `reward.lr`; 0: both responses of each pair are the same",
    ),
    "reward/skipped_steps": MetricInfo(
        "optimizer steps",
        "1 if the optimizer step was skipped because the gradient was not finite, else 0",
        "0; with fp16 a few at the start, until the loss scale is found",
        "above 0 throughout: use `hardware.dtype=bf16`, or lower `reward.lr`",
    ),
    "reward/pairs_per_second": MetricInfo(
        "pairs/s",
        "pairs of the batch divided by the step's seconds, over all ranks",
        "constant after the first steps",
        "falling: another process uses the machine, or data loading is the bottleneck",
    ),
    "reward/eval_accuracy": MetricInfo(
        "share",
        "share of held-out pairs whose chosen response scores higher",
        "close to reward/accuracy; annotators agree in about 0.7-0.8 of pairs",
        "well below reward/accuracy: overfitting; near 1 on human data: a leak, or length decides",
    ),
    "reward/eval_one_item_wrong": MetricInfo(
        "share",
        "synthetic task: share of right answers that score above their copy with one item replaced",
        "above 0.9",
        "near 0.5: the reward model does not detect errors, and PPO will not improve correctness",
        healthy_range=(0.9, 1.0),
    ),
    "reward/eval_one_item_too_many": MetricInfo(
        "share",
        "synthetic task: share of right answers that score above their copy with one item added",
        "above 0.9",
        "below 0.5: PPO will learn to add items",
        healthy_range=(0.9, 1.0),
    ),
    "reward/eval_one_item_missing": MetricInfo(
        "share",
        "synthetic task: share of right answers that score above their copy with one item removed",
        "above 0.9",
        "below 0.5: PPO will learn to drop items",
        healthy_range=(0.9, 1.0),
    ),
    "reward/eval_loss": MetricInfo(
        "nats per pair",
        "mean loss on held-out pairs",
        "below ln 2 = 0.693",
        "rises while reward/eval_accuracy does not fall: overconfident scores, use fewer "
        "`reward.epochs`",
    ),
    "reward/eval_chosen_score": MetricInfo(
        "score",
        "mean score of held-out chosen responses",
        "close to reward/chosen_score",
        "far from reward/chosen_score: overfitting, use fewer `reward.epochs`",
    ),
    "reward/eval_rejected_score": MetricInfo(
        "score",
        "mean score of held-out rejected responses",
        "below reward/eval_chosen_score",
        "equal to reward/eval_chosen_score: the model does not separate held-out responses",
    ),
}

SCORES = {
    "ppo/score_mean": MetricInfo(
        "score",
        "mean reward-model score of the step's responses, before scaling and clipping",
        "rises, then levels off",
        "flat: raise `ppo.actor_lr` or lower `ppo.kl_ctl`; rises while gold scores or samples get "
        "worse: the reward model is being exploited, raise `ppo.kl_ctl`",
    ),
    "ppo/score_average": MetricInfo(
        "score",
        "exponential average of ppo/score_mean over steps: 0.9 * previous average + 0.1 * this "
        "step's mean",
        "rises smoothly, then levels off",
        "see ppo/score_mean; the average has less noise",
    ),
    "ppo/score_std": MetricInfo(
        "score",
        "standard deviation of the scores over the step's responses",
        "shrinks slowly while the mean rises",
        "near 0: all responses have the same score, so nothing can be learned; see ppo/entropy",
    ),
    "ppo/reward_mean": MetricInfo(
        "reward",
        "mean over sequences of the summed token rewards: clipped score minus the penalty for a "
        "missing end minus kl_ctl * KL",
        "rises: PPO maximises it",
        "falls while ppo/score_mean rises: the KL penalty outweighs the gain",
    ),
    "ppo/reward_std": MetricInfo(
        "reward",
        "standard deviation over sequences of the summed token rewards",
        "of the order of ppo/score_std",
        "far above: a few sequences have a huge KL penalty; far below: `ppo.clip_reward_value` "
        "clips many scores",
    ),
}

DIVERGENCE = {
    "ppo/kl_to_reference": MetricInfo(
        "nats per sequence",
        "k1 estimate of KL(policy || reference): mean over sequences of the sum of log p - log "
        "p_reference",
        "starts near 0, grows to 1-30; near `ppo.kl_target` if that is set",
        "keeps growing: raise `ppo.kl_ctl` or lower `ppo.actor_lr`; clearly negative: responses "
        "are not samples of the scored policy (`rollout.top_k`, `rollout.top_p`, temperature)",
    ),
    "ppo/kl_to_reference_k3": MetricInfo(
        "nats per sequence",
        "k3 estimate of KL(policy || reference): mean over sequences of the sum of r - 1 - log r "
        "with r = p_reference / p; less noise, never negative",
        "close to ppo/kl_to_reference",
        "far above: the policy has made a few tokens rare that are likely under the reference",
    ),
    "ppo/kl_per_token": MetricInfo(
        "nats per token",
        "k1 estimate of KL(policy || reference): mean of log p - log p_reference over response "
        "tokens",
        "below about 0.3",
        "grows while ppo/kl_to_reference does not: responses get shorter and diverge more per "
        "token",
        healthy_range=(0.0, 0.3),
    ),
    "ppo/logprob_mismatch": MetricInfo(
        "nats per token",
        "rollout/training mismatch: mean |log p of the rollout - log p of the training forward "
        "pass|, with the same weights; only if the rollout backend returns log-probabilities",
        "1e-6 in fp32, about 0.01 in bf16",
        "above `rollout.max_logprob_mismatch`: log-probabilities are recomputed in every step; far "
        "above: the rollout samples from another policy (`rollout.top_k`, `rollout.top_p`, "
        "dropout)",
        healthy_range=(0.0, 0.02),
    ),
    "ppo/logprob_mismatch_share": MetricInfo(
        "share",
        "share of response tokens whose mismatch (see ppo/logprob_mismatch) is above 0.1 nats",
        "0 in fp32, below 0.05 in bf16",
        "see ppo/logprob_mismatch",
        healthy_range=(0.0, 0.05),
    ),
    "ppo/logprob_mismatch_max": MetricInfo(
        "nats",
        "largest mismatch of any response token",
        "1e-4 in fp32, below 1 in bf16",
        "above 2: some tokens come from another policy, or rare tokens suffer from low precision",
    ),
    "ppo/rollout_weight": MetricInfo(
        "1",
        "mean weight min(p of training / p of the rollout, `ppo.rollout_correction_cap`) of "
        "response tokens, before the first update; only with `ppo.rollout_correction=token_tis`",
        "0.99 to 1",
        "far below 1: many tokens are cut off at the cap, since the rollout samples from another "
        "policy; see ppo/logprob_mismatch",
        healthy_range=(0.98, 1.02),
    ),
    "ppo/rollout_weight_min": MetricInfo(
        "1",
        "smallest weight of any response token, see ppo/rollout_weight",
        "above 0.5",
        "near 0: a token that training finds impossible was sampled",
    ),
    "ppo/kl_ctl": MetricInfo(
        "reward per nat",
        "coefficient of the KL penalty in this step",
        "constant; with `ppo.kl_target`, it settles",
        "keeps growing: the target is out of reach, lower `ppo.actor_lr`; falls towards 0: the "
        "target is too high",
    ),
    "ppo/clipfrac": MetricInfo(
        "share",
        "share of response tokens whose loss the ratio clip changes, over all optimizer steps",
        "up to 0.2; in the default run 0.001 to 0.01, falling with the learning rate; 0 with one "
        "optimizer step per response",
        "above 0.3: steps are too large, lower `ppo.actor_lr` or `ppo.ppo_epochs`; always 0 with "
        "several optimizer steps: steps are too small",
        healthy_range=(0.0, 0.2),
    ),
    "ppo/approx_kl": MetricInfo(
        "nats per token",
        "k3 estimate of KL(old || new): mean of ratio - 1 - log ratio over response tokens",
        "below 0.02; never negative",
        "above 0.1: the policy moves too far from the policy that sampled, lower `ppo.actor_lr` or "
        "`ppo.ppo_epochs`",
        healthy_range=(0.0, 0.02),
    ),
    "ppo/ratio_mean": MetricInfo(
        "1",
        "mean ratio p_new / p_old over response tokens and all optimizer steps",
        "within 0.01 of 1",
        "away from 1: the old log-probabilities do not come from the policy that sampled, see "
        "ppo/logprob_mismatch",
        healthy_range=(0.99, 1.01),
    ),
    "ppo/ratio_max": MetricInfo(
        "1",
        "largest ratio p_new / p_old of any response token",
        "1-3",
        "above 10 occasionally: rare tokens, which are clipped; always above 10: rollout and "
        "training disagree on log-probabilities (precision, dropout)",
        healthy_range=(1.0, 3.0),
    ),
    "ppo/entropy": MetricInfo(
        "nats per token",
        "mean of -sum_v p(v) log p(v) over response tokens",
        "falls slowly",
        "near 0: the policy has collapsed to one answer, raise `ppo.kl_ctl`; rises steadily: "
        "responses become noise, lower `ppo.actor_lr`",
    ),
}

LOSSES = {
    "ppo/actor_loss": MetricInfo(
        "advantage per token",
        "mean of max(-A * ratio, -A * clip(ratio)) over response tokens",
        "close to 0; the value means little, since advantages are whitened",
        "far from 0 or jumping: see ppo/ratio_max and ppo/clipfrac",
    ),
    "ppo/critic_loss": MetricInfo(
        "reward squared per token",
        "mean of 0.5 * max((V - R)^2, (clipped V - R)^2) over response tokens",
        "falls over the first steps, then follows the variance of returns",
        "grows: raise `ppo.critic_lr`, or if rewards are unbounded, lower `ppo.clip_reward_value`",
    ),
    "ppo/value_error": MetricInfo(
        "reward squared per token",
        "mean of (V - R)^2 over response tokens, before training",
        "falls below ppo/returns_std squared",
        "stays above it: see ppo/explained_variance",
    ),
    "ppo/value_clipfrac": MetricInfo(
        "share",
        "share of response tokens whose clipped value error is larger than the unclipped error",
        "below 0.3; 0 if `ppo.cliprange_value` is null",
        "above 0.5: the clip slows the critic down, raise `ppo.cliprange_value`",
        healthy_range=(0.0, 0.3),
    ),
    "ppo/values_mean": MetricInfo(
        "reward",
        "mean of the critic's values over response tokens, before training",
        "follows ppo/returns_mean after a few steps",
        "does not follow: the critic does not learn, raise `ppo.critic_lr`",
    ),
    "ppo/values_std": MetricInfo(
        "reward",
        "standard deviation of the values over response tokens",
        "below ppo/returns_std, and above 0",
        "near 0: the critic predicts one number; above ppo/returns_std: the critic is noisy",
    ),
    "ppo/values_min": MetricInfo(
        "reward",
        "smallest value of any response token",
        "within the range of the returns",
        "far outside: the critic sees states that it was not trained on",
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
        "far above: values are extreme, see ppo/values_std",
    ),
    "ppo/returns_min": MetricInfo(
        "reward",
        "smallest R_t of any response token",
        "above -`ppo.clip_reward_value` minus the KL penalty",
        "far below: one sequence has a huge KL penalty",
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
        "always positive (negative): the critic predicts too low (high), see "
        "ppo/explained_variance",
    ),
    "ppo/advantages_std": MetricInfo(
        "reward",
        "standard deviation of A_t over response tokens, before whitening",
        "shrinks while the critic learns",
        "near 0: whitening amplifies noise, since nothing is left to learn; grows: the critic no "
        "longer follows the returns",
    ),
    "ppo/explained_variance": MetricInfo(
        "1",
        "1 - Var(R - V) / Var(R) over response tokens; 1: perfect; 0: no better than a constant",
        "rises from below 0 to 0.3-0.9",
        "stays at or below 0: the critic does not help, raise `ppo.critic_lr` or warm it up",
        healthy_range=(0.3, 0.9),
    ),
}

ROLLOUT = {
    "ppo/response_tokens": MetricInfo(
        "tokens",
        "mean length of a response, including its end token",
        "changes slowly, below `rollout.max_response_tokens`",
        "grows to the limit: the reward model prefers length, or the policy has unlearned to end; "
        "falls to 1: empty responses avoid the KL penalty, lower `ppo.kl_ctl`",
    ),
    "ppo/ended_share": MetricInfo(
        "share",
        "share of responses that end by themselves, within `rollout.max_response_tokens`",
        "above 0.9",
        "low: raise `rollout.max_response_tokens` or `ppo.missing_end_penalty`; 0 from the start: "
        "the SFT model never learned to end",
        healthy_range=(0.9, 1.0),
    ),
    "ppo/duplicate_share": MetricInfo(
        "share",
        "share of the responses of each rank's rollout that another prompt got too, token by token",
        "constant, and near 0 if prompts have different right answers",
        "rises: the policy gives the same answer to everything; raise `ppo.kl_ctl` or "
        "`ppo.entropy_coef`",
    ),
    "ppo/parts/NAME": MetricInfo(
        "as scored",
        "mean score of the part NAME of `rewards`, before normalisation and weighting",
        "rises with ppo/score_mean",
        "falls while ppo/score_mean rises: another part outweighs it, change the weights",
    ),
    "ppo/fallback_share": MetricInfo(
        "share",
        "share of the responses for which a part of `rewards` failed, and its fallback was used",
        "0",
        "above 0: the function or endpoint fails; the warnings on the terminal say why",
    ),
    "ppo/actor_learning_rate": MetricInfo(
        "1",
        "the actor's learning rate in the last optimizer step",
        "rises over `ppo.warmup_steps`, then follows `ppo.lr_schedule`",
        "never reaches `ppo.actor_lr`: the warm-up is longer than the phase",
    ),
    "ppo/critic_learning_rate": MetricInfo(
        "1",
        "the critic's learning rate in the last optimizer step",
        "like the actor's, but from `ppo.critic_lr`; usually larger",
        "never reaches `ppo.critic_lr`: the warm-up is longer than the phase",
    ),
    "ppo/actor_grad_norm": MetricInfo(
        "1",
        "norm of the actor's gradient before clipping, mean over optimizer steps",
        "steady",
        "growing: lower `ppo.actor_lr`; near 0: all advantages are near 0, see ppo/score_std",
    ),
    "ppo/critic_grad_norm": MetricInfo(
        "1",
        "norm of the critic's gradient before clipping, mean over optimizer steps",
        "large at first, then steady",
        "growing: lower `ppo.critic_lr` or `ppo.clip_reward_value`",
    ),
    "ppo/skipped_steps": MetricInfo(
        "optimizer steps",
        "optimizer steps of actor and critic that were skipped in this step because the gradient "
        "was not finite",
        "0; with fp16 a few at the start, until the loss scale is found",
        "above 0 throughout: use `hardware.dtype=bf16`",
    ),
}

PPO_OPTIONS = {
    "ppo/eval_score": MetricInfo(
        "score",
        "mean score of responses to held-out prompts, every `ppo.eval_every` steps",
        "rises with ppo/score_mean",
        "falls while ppo/score_mean rises: training prompts are memorised",
    ),
    "ppo/eval_gold": MetricInfo(
        "share",
        "mean gold score of the held-out responses, if the dataset has a judge",
        "rises with ppo/eval_score",
        "falls while ppo/eval_score rises: the reward model is exploited, raise `ppo.kl_ctl`",
    ),
    "ppo/eval_kl": MetricInfo(
        "nats per sequence",
        "k1 estimate of KL(policy || reference) on the held-out responses",
        "follows ppo/kl_to_reference",
        "see ppo/kl_to_reference",
    ),
    "ppo/eval_ended_share": MetricInfo(
        "share",
        "share of the held-out responses that end by themselves",
        "follows ppo/ended_share",
        "see ppo/ended_share",
    ),
    "ppo/eval_response_tokens": MetricInfo(
        "tokens",
        "mean length of the held-out responses",
        "follows ppo/response_tokens",
        "see ppo/response_tokens",
    ),
    "ppo/eval_parts/NAME": MetricInfo(
        "as scored",
        "mean score of the part NAME of `rewards` on the held-out responses",
        "rises with ppo/eval_score",
        "see ppo/parts/NAME",
    ),
    "ppo/eval_exact": MetricInfo(
        "share",
        "share of the held-out responses that are exactly right, if the dataset has a judge",
        "rises with ppo/eval_score",
        "falls while ppo/eval_score rises: the reward model is exploited, raise `ppo.kl_ctl`",
    ),
    "ppo/eval_exact_greedy": MetricInfo(
        "share",
        "share of held-out prompts whose greedy response is exactly right, if the dataset has a "
        "judge",
        "does not fall",
        "falls: the reward model is exploited, raise `ppo.kl_ctl`",
    ),
    "ppo/eval_correct": MetricInfo(
        "share",
        "mean of the part *correct* of the gold score of the held-out responses",
        "rises with ppo/eval_gold",
        "flat while ppo/eval_gold rises: the policy learns only manners",
    ),
    "ppo/eval_polite": MetricInfo(
        "share",
        "mean of the part *polite* of the gold score of the held-out responses",
        "rises towards 1",
        "flat: the reward model ignores manners",
    ),
    "ppo/eval_stops": MetricInfo(
        "share",
        "mean of the part *stops* of the gold score of the held-out responses",
        "rises towards 1",
        "falls: answers ramble, or never end",
    ),
    "ppo/ptx_loss": MetricInfo(
        "nats per token",
        "language-model loss on the corpus of `ppo.ptx_coef`",
        "constant, or falls slowly",
        "rises: the policy forgets the corpus, raise `ppo.ptx_coef` or `ppo.ptx_batch_size`",
    ),
    "ppo/kl_loss": MetricInfo(
        "nats per token",
        "mean KL(policy || reference) in the loss, with `ppo.kl_placement=loss`",
        "follows ppo/kl_per_token",
        "keeps growing: raise `ppo.kl_ctl`",
    ),
    "ppo/dual_clipfrac": MetricInfo(
        "share",
        "share of response tokens whose loss `ppo.dual_clip` limits; 0 if `ppo.dual_clip` is null",
        "below 0.01",
        "above 0.01: the policy moves too far in one step, lower `ppo.actor_lr`",
        healthy_range=(0.0, 0.01),
    ),
    "ppo/lr_scale": MetricInfo(
        "1",
        "factor of the actor's learning rate, set by `ppo.lr_guard_kl`",
        "1, with temporary falls after large steps",
        "at its minimum of 0.001: `ppo.actor_lr` is far too high for `ppo.lr_guard_kl`",
    ),
    "rollout/accelerated_layers": MetricInfo(
        "layers",
        "layers that DeepSpeed's Hybrid Engine has replaced by its own, with "
        "`rollout=hybrid_engine`",
        "the number of the model's layers",
        "fewer: the other layers run in transformers; a run with 0 does not start",
    ),
    "ppo/updates": MetricInfo(
        "steps",
        "optimizer steps on the rollout",
        "`ppo.ppo_epochs` * rollout_batch_size / mini_batch_size",
        "fewer: `ppo.stop_update_kl` stopped the updates early",
    ),
    "ppo/actor_overflows": MetricInfo(
        "steps",
        "optimizer steps in which the actor's fp16 gradients overflowed",
        "0, or one now and then",
        "every step: no loss scale works, use `hardware.dtype=bf16`",
    ),
    "ppo/critic_overflows": MetricInfo(
        "steps",
        "optimizer steps in which the critic's fp16 gradients overflowed",
        "0, or one now and then",
        "every step: no loss scale works, use `hardware.dtype=bf16`",
    ),
}

TIMES = {
    "time/generate_seconds": MetricInfo(
        "s",
        "time to sample the responses of one step",
        "the longest of the three parts, often more than half of a step",
        "grows: responses get longer, see ppo/response_tokens",
    ),
    "time/score_seconds": MetricInfo(
        "s",
        "time to compute log-probabilities, values and scores of the responses of one step",
        "below time/train_seconds, since scoring runs only forward passes",
        "above time/train_seconds: `hardware.max_micro_batch_size` is too small, or models are "
        "offloaded",
    ),
    "time/train_seconds": MetricInfo(
        "s",
        "time for the optimizer steps of actor and critic in one PPO step",
        "constant; proportional to `ppo.ppo_epochs`",
        "grows: responses get longer; jumps: the machine is shared or swaps",
    ),
    "time/step_seconds": MetricInfo(
        "s",
        "time of one step: the sum of the three parts above",
        "constant",
        "grows or jumps: see the three parts",
    ),
    "speed/tokens_per_second": MetricInfo(
        "tokens/s",
        "prompt and response tokens of one step without padding, divided by time/step_seconds, "
        "over all ranks",
        "constant after the first steps",
        "falling at constant ppo/response_tokens: another process uses the machine",
    ),
    "speed/generate_tflops": MetricInfo(
        "10^12 operations/s",
        "the actor's FLOPs in sampling (each token once, without padding), divided by "
        "time/generate_seconds, over all ranks",
        "constant",
        "falling: another process uses the machine",
    ),
    "speed/generate_mfu": MetricInfo(
        "share",
        "model FLOPs utilisation: speed/generate_tflops divided by the peak of all ranks "
        "(`hardware.peak_tflops`; if null, the measured rate of large matrix products)",
        "below 0.1: decoding is limited by memory bandwidth",
        "far below 0.1: raise `ppo.rollout_batch_size`",
    ),
    "speed/score_tflops": MetricInfo(
        "10^12 operations/s",
        "FLOPs of the forward passes that score, divided by time/score_seconds, over all ranks",
        "constant",
        "falling: another process uses the machine",
    ),
    "speed/score_mfu": MetricInfo(
        "share",
        "speed/score_tflops divided by the peak of all ranks",
        "0.3 to 0.5 with a billion weights, less with small models",
        "lower: raise `hardware.max_micro_batch_size`",
    ),
    "speed/train_tflops": MetricInfo(
        "10^12 operations/s",
        "FLOPs of the forward and backward passes of actor and critic, without recomputation by "
        "gradient checkpointing, divided by time/train_seconds, over all ranks",
        "constant",
        "falling: another process uses the machine",
    ),
    "speed/train_mfu": MetricInfo(
        "share",
        "speed/train_tflops divided by the peak of all ranks",
        "0.3 to 0.5 with a billion weights, less with small models",
        "lower: raise `hardware.max_micro_batch_size`, or turn off gradient checkpointing",
    ),
    "memory/peak_gib": MetricInfo(
        "GiB",
        "peak memory of any rank: of its GPU in this phase, or of its process on a CPU",
        "constant after the first steps",
        "grows: memory is not freed between steps",
    ),
}

DPO = {
    "dpo/loss": MetricInfo(
        "nats per pair",
        "mean of -log sigmoid(margin) over pairs, smoothed by `dpo.label_smoothing`",
        "starts at ln 2 = 0.69 and falls",
        "flat: `dpo.lr` is too low; falls to 0: pairs are memorised, use fewer `dpo.epochs`",
    ),
    "dpo/accuracy": MetricInfo(
        "share",
        "share of pairs whose chosen response has the larger implicit reward",
        "rises from 0.5 towards dpo/eval_accuracy",
        "stays at 0.5: nothing is learned; 1: see dpo/loss",
    ),
    "dpo/margin": MetricInfo(
        "reward",
        "mean of the chosen response's implicit reward minus the rejected response's",
        "rises",
        "above 10: the policy has moved far from its reference, raise `dpo.beta`",
    ),
    "dpo/chosen_reward": MetricInfo(
        "reward",
        "`dpo.beta` * (log p - log p of the reference) of the chosen response",
        "near 0, or falls more slowly than dpo/rejected_reward",
        "far below 0: chosen responses lose probability too, lower `dpo.lr` or raise `dpo.beta`",
    ),
    "dpo/rejected_reward": MetricInfo(
        "reward",
        "`dpo.beta` * (log p - log p of the reference) of the rejected response",
        "falls",
        "rises with dpo/chosen_reward: the policy learns only the form; see dpo/margin",
    ),
    "dpo/learning_rate": MetricInfo(
        "1",
        "learning rate in the last optimizer step",
        "rises over `dpo.warmup_steps`, then follows `dpo.lr_schedule`",
        "never reaches `dpo.lr`: the warm-up is longer than the phase",
    ),
    "dpo/grad_norm": MetricInfo(
        "1",
        "norm of the whole gradient before clipping",
        "steady",
        "growing: lower `dpo.lr`",
    ),
    "dpo/skipped_steps": MetricInfo(
        "optimizer steps",
        "1 if the optimizer step was skipped because the gradient was not finite, else 0",
        "0; with fp16 a few at the start, until the loss scale is found",
        "above 0 throughout: use `hardware.dtype=bf16`, or lower `dpo.lr`",
    ),
    "dpo/pairs_per_second": MetricInfo(
        "pairs/s",
        "pairs of the batch divided by the step's seconds, over all ranks",
        "constant after the first steps",
        "falling: another process uses the machine",
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

GROUPS: Mapping[str, Mapping[str, MetricInfo]] = {
    "Supervised fine-tuning": SFT,
    "Reward model": REWARD,
    "PPO: scores and rewards": SCORES,
    "PPO: how far the policy moves": DIVERGENCE,
    "PPO: losses, values and advantages": LOSSES,
    "PPO: responses and optimizers": ROLLOUT,
    "PPO: evaluation and options": PPO_OPTIONS,
    "PPO: time, speed and memory": TIMES,
    "DPO": DPO,
}
METRICS = {name: info for group in GROUPS.values() for name, info in group.items()}


def entry_of(name: str) -> str:
    """Return the name of a metric in ``METRICS``, where NAME stands for names that users choose."""
    group, _, last = name.rpartition("/")
    return f"{group}/NAME" if last and f"{group}/NAME" in METRICS else name
