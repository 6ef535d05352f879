"""Schema and rules of the config group ``ppo``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import (
    AdvantageEstimator,
    KlEstimator,
    KlPlacement,
    LrSchedule,
    ScaleReward,
)
from rlhf.config.schema.keys import (
    ABOVE_0,
    ABOVE_0_TO_1,
    ABOVE_1,
    AT_LEAST_0,
    FROM_0_BELOW_1,
    FROM_0_TO_1,
    ROWS,
    SCORE,
    AtResume,
    LossLimit,
    Unread,
    key,
    needs,
)
from rlhf.config.schema.supervised import AdamWConfig

if TYPE_CHECKING:
    from rlhf.options import PpoConfig

LossAggregation = StrEnum("LossAggregation", "token_mean sequence_mean fixed_length")
"""Averages of the actor's token losses in a mini-batch; the critic always uses token_mean."""

SurrogateName = StrEnum("SurrogateName", "clip gspo cispo dppo_tv dppo_kl")
"""Losses of the actor (docs/algorithms.md)."""

# Estimators that compare the responses to one prompt.
COMPARING = (AdvantageEstimator.rloo, AdvantageEstimator.grpo, AdvantageEstimator.dr_grpo)

MASKED = Unread(
    ("missing_end_mask", "advantage_estimator"),
    lambda masks, estimator: masks and estimator not in COMPARING,
    "use {key}=false",
)

CLIP = LossLimit(math.inf, "tokens whose probability has changed too much are masked")
SCORED = Unread(("missing_end_score",), lambda score: score is not None, "use {key}=null")
PENALTY = needs("kl_ctl", fix="use {key}=0.1")
CISPO_HIGH = Unread(
    ("surrogate", "cliprange_high"),
    lambda surrogate, high: surrogate is SurrogateName.cispo and high is not None,
    "use {group}.cliprange_high",
)
FIXED_SCALE = needs("scale_reward", "reference")
SHIFTED = needs("scale_reward_shift", "true")
CRITIC = needs("advantage_estimator", "gae")
SEPARATE = needs("shared_trunk", "false")
VALUE_LOSS = needs("value_coef", fix="use {key}=1")
BOTH_LAMBDAS = Unread(
    ("lam_critic", "lam_length_alpha"),
    lambda critic, actor: critic is not None and actor is not None,
    "use {key}=null",
)
CRITIC_LR_FALLS = Unread(
    ("critic_lr_schedule", "lr_schedule"),
    lambda own, common: (own or common) is LrSchedule.constant,
    "use {key}=cosine",
)
OVERFLOWS = needs("hardware.dtype", "fp16", "auto")
FALLING_RATES = Unread(
    ("lr_schedule", "critic_lr_schedule", "critic_min_lr_ratio"),
    lambda actor, critic, ratio: (
        actor is LrSchedule.constant and (critic in (None, actor) or ratio is not None)
    ),
    "use {key}=cosine",
)


@dataclass(kw_only=True)
class PpoKeys(AdamWConfig):
    """Keys for proximal policy optimisation, and for its evaluations."""

    steps: int | None = key(ABOVE_0)
    """Maximum number of PPO steps; each samples one rollout and learns from it. null: no limit."""
    epochs: float | None = key(ABOVE_0)
    """Maximum number of passes over the prompts; null: no limit."""
    rollout_batch_size: int = key(ROWS)
    """Responses sampled per PPO step, over all ranks."""
    responses_per_prompt: int = key(ROWS)
    """Responses sampled per prompt; the advantage estimators rloo and grpo compare them."""
    mini_batch_size: int = key(ROWS)
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int | None = key(ROWS, at_resume=AtResume.rounding)
    """Sequences that one rank runs at once; null: as many as the hardware allows."""
    ppo_epochs: int = key(ABOVE_0)
    """Passes over each rollout."""
    kl_ctl: float = key(AT_LEAST_0)
    """Penalty per nat of KL(policy || reference), with kl_target the initial penalty; 0: none."""
    kl_target: float | None = key(ABOVE_0)
    """KL in nats per sequence to which kl_ctl is steered; null: kl_ctl is fixed."""
    kl_horizon: int = key(ABOVE_0, unread=[needs("kl_target", fix="add {key}=NATS")])
    """Horizon, in sequences, over which kl_ctl adapts to kl_target; larger: more slowly."""
    kl_estimator: KlEstimator = key(unread=[PENALTY])
    """Estimator of the KL penalty: k1, k2, k3, or in the loss k3_ratio (docs/algorithms.md)."""
    kl_placement: KlPlacement = key(unread=[PENALTY])
    """Where the KL penalty enters: token rewards (reward: InstructGPT), the loss (loss: GRPO) or
    each token's own advantage (advantage)."""
    surrogate: SurrogateName
    """clip (PPO), gspo (a ratio per response), cispo (a clipped weight of log pi), or dppo_tv and
    dppo_kl, which mask tokens by their divergence instead of by their ratio."""
    cliprange: float = key(FROM_0_BELOW_1, unread=[CISPO_HIGH], limit=CLIP)
    """The policy ratio is clipped to [1 - cliprange, 1 + cliprange]; dppo: largest divergence."""
    cliprange_high: float | None = key(ABOVE_0, limit=CLIP)
    """The upper limit of the policy ratio is 1 + cliprange_high (DAPO); null: 1 + cliprange. dppo:
    largest divergence of tokens with positive advantage; null: cliprange."""
    dual_clip: float | None = key(
        ABOVE_1,
        unread=[needs("surrogate", "clip")],
        limit=LossLimit(None, "the loss of tokens with negative advantage is bounded"),
    )
    """The loss of a token with negative advantage A is at most -dual_clip * A; null: no limit."""
    cliprange_value: float | None = key(ABOVE_0, unread=[CRITIC, VALUE_LOSS])
    """Values are clipped to within this distance of the rollout's values; null: not clipped."""
    scale_reward: ScaleReward
    """none: keep scores; running: divide by their deviation so far; reference: by a fixed one."""
    scale_reward_shift: bool = key(unread=[needs("scale_reward", "running", "reference")])
    """With scale_reward, also subtract the mean of the scores before the division."""
    reference_score_mean: float | None = key(SCORE, unread=[FIXED_SCALE, SHIFTED])
    """Mean for scale_reward=reference; null: mean score of the first rollout."""
    reference_score_std: float | None = key(ABOVE_0, unread=[FIXED_SCALE])
    """Standard deviation for scale_reward=reference; null: that of the first rollout's scores."""
    clip_reward_value: float | None = key(ABOVE_0)
    """Scores are clipped to [-clip_reward_value, clip_reward_value]; null: not clipped."""
    missing_end_mask: bool
    """Leave responses that never ended out of all losses (DAPO's overlong filtering); their scores
    still count where responses to a prompt are compared."""
    missing_end_penalty: float = key(AT_LEAST_0, unread=[MASKED, SCORED])
    """Penalty subtracted from the clipped score of a response that never ended."""
    missing_end_score: float | None = key(SCORE, unread=[MASKED])
    """Score of every response that never ended, without clip and penalty; null: its own score."""
    advantage_estimator: AdvantageEstimator
    """gae (the only one with a critic), rloo, grpo, dr_grpo, reinforce_pp (docs/algorithms.md)."""
    gamma: float = key(ABOVE_0_TO_1, unread=[needs("advantage_estimator", "gae", "reinforce_pp")])
    """Discount per token."""
    lam: float = key(FROM_0_TO_1, unread=[CRITIC, BOTH_LAMBDAS])
    """Lambda of generalised advantage estimation."""
    lam_critic: float | None = key(FROM_0_TO_1, unread=[CRITIC, VALUE_LOSS])
    """Lambda of the critic's targets (VC-PPO: 1, plain returns); null: lam."""
    lam_length_alpha: float | None = key(ABOVE_0, unread=[CRITIC])
    """The actor's lambda is 1 - 1 / (lam_length_alpha * tokens), VAPO's with 0.05; null: lam."""
    whiten_advantages: bool | None
    """Shift and scale advantages to mean 0 and deviation 1 over the whole rollout. null: only with
    gae and reinforce_pp, because rloo and grpo already compare the responses of a group."""
    whiten_rewards: bool
    """Scale token rewards to deviation 1 over the whole rollout without shifting them to mean 0."""
    loss_aggregation: LossAggregation
    """token_mean: all tokens of a mini-batch weigh the same; sequence_mean: all responses do;
    fixed_length: the sum over each response's tokens is divided by the longest possible length."""
    entropy_coef: float = key(AT_LEAST_0)
    """Weight of the entropy bonus (nats per token) in the actor's loss, with entropy_target the
    initial weight; 0: none."""
    entropy_target: float | None = key(ABOVE_0)
    """Entropy in nats per token to which entropy_coef is steered; null: entropy_coef is fixed."""
    entropy_coef_step: float = key(ABOVE_0, unread=[needs("entropy_target", fix="add {key}=NATS")])
    """Change of entropy_coef after each PPO step with entropy_target."""
    value_coef: float = key(AT_LEAST_0, unread=[CRITIC])
    """Weight of the critic's loss."""
    actor_freeze_steps: int = key(AT_LEAST_0)
    """Number of initial PPO steps in which only the critic is trained; 0: none."""
    stop_update_kl: float | None = key(ABOVE_0)
    """KL(sampler || new), nats per token, above which a rollout's updates end early; null: none."""
    stop_run_kl: float | None = key(ABOVE_0)
    """KL to the reference, nats per sequence, above which the phase ends; null: never."""
    lr_guard_kl: float | None = key(ABOVE_0)
    """KL(old || new), nats per token, above which the actor's learning rate falls; null: none."""
    align_overflow: bool = key(unread=[CRITIC, OVERFLOWS, SEPARATE])
    """Skip the optimizer step of actor and critic if the fp16 gradients of either overflow."""
    actor_dropout: float = key(FROM_0_BELOW_1)
    """Dropout probability in the actor's updates; rollouts are always scored without dropout."""
    critic_dropout: float = key(FROM_0_BELOW_1, unread=[CRITIC, SEPARATE])
    """Dropout probability in the critic's updates."""
    actor_lr: float = key(ABOVE_0)
    """Peak learning rate of the actor."""
    min_lr_ratio: float = key(FROM_0_TO_1, unread=[FALLING_RATES])
    """Final learning rate (inverse_sqrt: lowest) as a share of the peak; unused by constant."""
    critic_lr: float = key(ABOVE_0, unread=[CRITIC, SEPARATE])
    """Peak learning rate of the critic."""
    critic_lr_schedule: LrSchedule | None = key(unread=[CRITIC, SEPARATE])
    """Learning-rate schedule of the critic; null: lr_schedule."""
    critic_min_lr_ratio: float | None = key(FROM_0_TO_1, unread=[CRITIC, CRITIC_LR_FALLS, SEPARATE])
    """Final learning rate of the critic as a share of its peak; null: min_lr_ratio."""
    critic_warmup_steps: int | None = key(AT_LEAST_0, unread=[CRITIC, SEPARATE])
    """Warm-up of the critic in optimizer steps; null: warmup_steps."""
    critic_weight_decay: float | None = key(AT_LEAST_0, unread=[CRITIC, SEPARATE])
    """Weight decay of the critic; null: weight_decay."""
    critic_beta1: float | None = key(FROM_0_BELOW_1, unread=[CRITIC, SEPARATE])
    """beta1 of the critic; null: beta1."""
    critic_beta2: float | None = key(FROM_0_BELOW_1, unread=[CRITIC, SEPARATE])
    """beta2 of the critic; null: beta2."""
    eval_prompts: int = key(ABOVE_0)
    """Maximum number of held-out prompts to answer in each evaluation; data=synthetic has 700."""
    eval_every: int = key(AT_LEAST_0)
    """PPO steps between evaluations; 0: only before and after training."""
    sample_every: int = key(ABOVE_0)
    """PPO steps between samples of responses in samples.jsonl."""

    @property
    def whitens_advantages(self) -> bool:
        """Return whiten_advantages or, if it is null, the default of the advantage estimator."""
        if self.whiten_advantages is not None:
            return self.whiten_advantages
        return self.advantage_estimator not in COMPARING


def check_ppo(ppo: PpoConfig) -> None:
    """Check options of PPO that require or exclude one another."""
    estimator, compares = ppo.advantage_estimator, ppo.advantage_estimator in COMPARING
    broken = {
        "ppo.steps=null: ppo.epochs is null too; set one, or both, as caps": (
            ppo.steps is None and ppo.epochs is None
        ),
        f"ppo.advantage_estimator={estimator}: compares the responses to one prompt, but "
        "ppo.responses_per_prompt=1; use 2 or more": compares and ppo.responses_per_prompt == 1,
        f"ppo.whiten_rewards=true: {estimator} compares whole responses, not tokens; set "
        "ppo.whiten_rewards=false": compares and ppo.whiten_rewards,
        "ppo.kl_estimator=k1 with ppo.kl_placement=loss: the gradient of k1 is 0 on average; use "
        "ppo.kl_estimator=k3_ratio, or k2": (
            ppo.kl_placement is KlPlacement.loss and ppo.kl_estimator is KlEstimator.k1
        ),
        f"ppo.kl_estimator=k3_ratio with ppo.kl_placement={ppo.kl_placement}: the ratio has an "
        "effect in the loss only; use ppo.kl_placement=loss, or ppo.kl_estimator=k1": (
            ppo.kl_placement is not KlPlacement.loss and ppo.kl_estimator is KlEstimator.k3_ratio
        ),
        f"ppo.kl_horizon={ppo.kl_horizon}: with ppo.kl_target, must be above a fifth of "
        f"ppo.rollout_batch_size={ppo.rollout_batch_size}, otherwise ppo.kl_ctl could fall below "
        f"0; use {ppo.rollout_batch_size // 5 + 1} or more": (
            ppo.kl_target is not None and ppo.rollout_batch_size >= 5 * ppo.kl_horizon
        ),
        f"ppo.kl_target={ppo.kl_target}: the penalty must have an initial weight; use "
        "ppo.kl_ctl=0.1": ppo.kl_target is not None and not ppo.kl_ctl,
        f"ppo.entropy_target={ppo.entropy_target}: the bonus must have an initial weight; use "
        "ppo.entropy_coef=0.005": ppo.entropy_target is not None and not ppo.entropy_coef,
        f"ppo.actor_freeze_steps={ppo.actor_freeze_steps}: ppo.advantage_estimator={estimator} has "
        "no critic to train meanwhile; use 0, or ppo.advantage_estimator=gae": (
            ppo.actor_freeze_steps > 0 and estimator is not AdvantageEstimator.gae
        ),
        f"ppo.actor_freeze_steps={ppo.actor_freeze_steps}: the actor must learn in some of "
        f"ppo.steps={ppo.steps}; use a number below {ppo.steps}": (
            ppo.steps is not None and ppo.actor_freeze_steps >= ppo.steps
        ),
    }
    refuse_broken_rule(broken)
