"""Schema of the config group ``ppo``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlhf.config.choices import (
    AdvantageEstimator,
    GaeUnit,
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
    NO_PHASE,
    ROWS,
    SCORE,
    AtResume,
    Unread,
    key,
)
from rlhf.config.schema.supervised import AdamWConfig


class LossAggregation(StrEnum):
    """Averages of the actor's token losses in a mini-batch; the critic always uses token_mean."""

    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    fixed_length = "fixed_length"


class ValueTargets(StrEnum):
    """Sources of advantages and of the critic's targets."""

    gae = "gae"
    monte_carlo = "monte_carlo"


class SurrogateName(StrEnum):
    """Losses of the actor (docs/algorithms.md)."""

    clip = "clip"
    gspo = "gspo"
    cispo = "cispo"


class RolloutCorrection(StrEnum):
    """Levels of importance weights for responses that another policy sampled."""

    none = "none"
    token = "token"
    sequence = "sequence"
    geometric = "geometric"


class CorrectionMode(StrEnum):
    """What happens to an importance weight beyond its limits: it is cut off, or becomes 0."""

    truncate = "truncate"
    mask = "mask"


class ProximalPolicy(StrEnum):
    """Policies around which the ratio is clipped."""

    step_start = "step_start"
    interpolated = "interpolated"


# Estimators that compare the responses to one prompt.
COMPARING = (AdvantageEstimator.rloo, AdvantageEstimator.grpo, AdvantageEstimator.dr_grpo)

NO_CORRECTION = Unread(
    lambda ppo: ppo.rollout_correction is RolloutCorrection.none,
    "{group}.rollout_correction=none weighs nothing",
    "add {group}.rollout_correction=token, sequence or geometric",
)
TRUNCATING = Unread(
    lambda ppo: ppo.rollout_correction_mode is CorrectionMode.truncate,
    "{group}.rollout_correction_mode=truncate has only a cap",
    "add {group}.rollout_correction_mode=mask",
)
AT_STEP_START = Unread(
    lambda ppo: ppo.proximal_policy is ProximalPolicy.step_start,
    "{group}.proximal_policy=step_start does not interpolate",
    "add {group}.proximal_policy=interpolated",
)

NO_BRANCHES = Unread(
    lambda ppo: ppo.value_targets is ValueTargets.gae,
    "{group}.value_targets=gae samples no branches",
    "add {group}.value_targets=monte_carlo",
)
NO_LAMBDA = Unread(
    lambda ppo: ppo.value_targets is ValueTargets.monte_carlo,
    "{group}.value_targets=monte_carlo has no lambda",
    "add {group}.value_targets=gae",
)
NO_CHECK = Unread(
    lambda check: check.every == 0, "{group}.every=0 checks nothing", "add {group}.every=8"
)


@dataclass(kw_only=True)
class CriticCheckConfig:
    """Checks of the critic against true values (docs/algorithms.md)."""

    every: int = key(AT_LEAST_0)
    """PPO steps between checks, which sample responses from states in the middle of responses;
    0: none. 8 costs 7 % of the default run's steps."""
    states: int = key(ABOVE_0, unread=[NO_CHECK])
    """States per check, over all ranks: pairs that follow alternative steps from one state."""
    branches: int = key(ABOVE_1, unread=[NO_CHECK])
    """Continuations sampled from each state; their mean estimates its true value."""
    step_tokens: int = key(ABOVE_0, unread=[NO_CHECK])
    """Tokens of a step, by which the two states of a pair differ."""


@dataclass(kw_only=True)
class PpoConfig(AdamWConfig):
    """Proximal policy optimisation against the reward model."""

    steps: int | None = key(ABOVE_0)
    """Maximum number of PPO steps; each samples one rollout and learns from it. null: no limit."""
    epochs: float | None = key(ABOVE_0)
    """Maximum number of passes over the prompts; null: no limit."""
    rollout_batch_size: int = key(ROWS)
    """Responses sampled per PPO step, over all ranks."""
    responses_per_prompt: int = key(ROWS)
    """Responses sampled per prompt; the advantage estimators rloo and grpo compare them."""
    resampling_rounds: int = key(AT_LEAST_0)
    """DAPO's dynamic sampling: how often a prompt whose responses all have the same score is
    replaced by another one; 0: never."""
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
    kl_horizon: int = key(ABOVE_0)
    """Horizon, in sequences, over which kl_ctl adapts to kl_target; larger: more slowly."""
    kl_estimator: KlEstimator
    """Estimator of the KL penalty: k1, k2 or k3 (http://joschu.net/blog/kl-approx.html)."""
    kl_placement: KlPlacement
    """Where the KL penalty enters: token rewards (reward: InstructGPT), the loss (loss: GRPO) or
    each token's own advantage (advantage: on-policy distillation)."""
    teacher_path: str | None
    """Model folder or hub id of a teacher, which is the reference of the KL penalty; null: none."""
    surrogate: SurrogateName
    """clip (PPO), gspo (a ratio per response) or cispo (a clipped weight of log pi)."""
    cliprange: float = key(FROM_0_BELOW_1)
    """The policy ratio is clipped to [1 - cliprange, 1 + cliprange]."""
    cliprange_high: float | None = key(ABOVE_0)
    """The upper limit of the policy ratio is 1 + cliprange_high (DAPO); null: 1 + cliprange."""
    dual_clip: float | None = key(ABOVE_1)
    """The loss of a token with negative advantage A is at most -dual_clip * A; null: no limit."""
    cliprange_value: float | None = key(ABOVE_0)
    """Values are clipped to within this distance of the rollout's values; null: not clipped."""
    scale_reward: ScaleReward
    """Divide scores by: none; running: their deviation so far; reference: a fixed deviation."""
    scale_reward_shift: bool
    """With scale_reward, also subtract the mean of the scores before the division."""
    reference_score_mean: float | None = key(SCORE)
    """Mean for scale_reward=reference; null: mean score of the first rollout."""
    reference_score_std: float | None = key(ABOVE_0)
    """Standard deviation for scale_reward=reference; null: that of the first rollout's scores."""
    clip_reward_value: float | None = key(ABOVE_0)
    """Scores are clipped to [-clip_reward_value, clip_reward_value]; null: not clipped."""
    missing_end_penalty: float = key(AT_LEAST_0)
    """Penalty subtracted from the clipped score of a response that never ended."""
    missing_end_score: float | None = key(SCORE)
    """Score of every response that never ended, without clip and penalty; null: its own score."""
    advantage_estimator: AdvantageEstimator
    """gae (the only one with a critic), rloo, grpo, dr_grpo, reinforce_pp (docs/algorithms.md)."""
    gamma: float = key(ABOVE_0_TO_1)
    """Discount per token."""
    lam: float = key(FROM_0_TO_1, unread=[NO_LAMBDA])
    """Lambda of generalised advantage estimation."""
    lam_critic: float | None = key(FROM_0_TO_1, unread=[NO_LAMBDA])
    """Lambda of the critic's targets (VC-PPO: 1, returns without a value); null: lam."""
    lam_length_alpha: float | None = key(ABOVE_0, unread=[NO_LAMBDA])
    """The actor's lambda is 1 - 1 / (lam_length_alpha * tokens), VAPO's with 0.05; null: lam."""
    value_targets: ValueTargets
    """gae; or monte_carlo (VinePPO): mean returns of continuations from each step's beginning."""
    value_branches: int = key(ABOVE_1, unread=[NO_BRANCHES])
    """Continuations per step of a response with value_targets=monte_carlo."""
    value_step_tokens: int = key(ABOVE_0, unread=[NO_BRANCHES])
    """Tokens of a step of a response with value_targets=monte_carlo."""
    gae_unit: GaeUnit
    """Time step of gamma and lam: token, or turn of an episode with an environment."""
    whiten_advantages: bool | None
    """Shift and scale advantages to mean 0 and deviation 1 over the whole rollout. null: only with
    gae and reinforce_pp, because rloo and grpo already compare the responses of a group."""
    whiten_rewards: bool
    """Scale token rewards to deviation 1 over the whole rollout without shifting them to mean 0."""
    loss_aggregation: LossAggregation
    """token_mean: all tokens of a mini-batch weigh the same; sequence_mean: all responses do;
    fixed_length: the sum over each response's tokens is divided by the longest possible length."""
    entropy_coef: float = key(AT_LEAST_0)
    """Weight of the entropy bonus (nats per token) in the actor's loss; 0: none."""
    value_coef: float = key(AT_LEAST_0)
    """Weight of the critic's loss."""
    ptx_coef: float = key(AT_LEAST_0)
    """Weight of the language-model loss on data.ptx_path (InstructGPT's gamma); 0: none."""
    ptx_batch_size: int | None = key(ROWS)
    """Blocks of the corpus per optimizer step, over all ranks; null: mini_batch_size."""
    ptx_eval_blocks: int = key(AT_LEAST_0)
    """Maximum held-out blocks of data.ptx_path to measure perplexity on; 0: do not measure it."""
    ema_beta: float = key(FROM_0_BELOW_1)
    """Decay per optimizer step of a moving average of the actor's weights; 0: no average."""
    rollout_correction: RolloutCorrection
    """Weigh losses by p_proximal / p_sampled: of each token, or the product over the response
    (sequence), or its geometric mean over the response (geometric)."""
    rollout_correction_mode: CorrectionMode = key(unread=[NO_CORRECTION])
    """Weights beyond the limits are cut off at the cap (truncate), or become 0 (mask)."""
    rollout_correction_cap: float = key(ABOVE_1, unread=[NO_CORRECTION])
    """Largest weight of rollout_correction."""
    rollout_correction_floor: float = key(FROM_0_BELOW_1, unread=[NO_CORRECTION, TRUNCATING])
    """Smallest weight of rollout_correction_mode=mask (IcePop: 0.5); 0: none."""
    rollout_correction_control: bool = key(unread=[NO_CORRECTION])
    """Deal the weights to tokens, or responses, at random: a control for rollout_correction."""
    proximal_policy: ProximalPolicy
    """The ratio is clipped around: the policy at the step's start, or A-3PO's interpolation."""
    proximal_share: float | None = key(ABOVE_0_TO_1, unread=[AT_STEP_START])
    """Share of the sampler in proximal_policy=interpolated; null: A-3PO's 1 / rollout.lag, or 1."""
    actor_freeze_steps: int = key(AT_LEAST_0)
    """Number of initial PPO steps in which only the critic is trained; 0: none."""
    stop_update_kl: float | None = key(ABOVE_0)
    """KL(old || new), nats per token, above which a rollout's updates stop early; null: none."""
    stop_run_kl: float | None = key(ABOVE_0)
    """KL to the reference, nats per sequence, above which the phase ends; null: never."""
    lr_guard_kl: float | None = key(ABOVE_0)
    """KL(old || new), nats per token, above which the actor's learning rate falls; null: none."""
    align_overflow: bool
    """Skip the optimizer step of actor and critic if the fp16 gradients of either overflow."""
    shared_trunk: bool
    """Make critic and reference branches of the actor's trunk (trlx's hydra model)."""
    num_layers_unfrozen: int | None = key(ABOVE_0)
    """Top layers that a shared trunk trains; the reference is a frozen copy. null: not shared."""
    num_value_layers: int = key(AT_LEAST_0)
    """Top layers that the critic of a shared trunk does not share; 0: only its value head."""
    actor_dropout: float = key(FROM_0_BELOW_1)
    """Dropout probability in the actor's updates; rollouts are always scored without dropout."""
    critic_dropout: float = key(FROM_0_BELOW_1)
    """Dropout probability in the critic's updates."""
    actor_lr: float = key(ABOVE_0)
    """Peak learning rate of the actor."""
    critic_lr: float = key(ABOVE_0)
    """Peak learning rate of the critic."""
    critic_lr_schedule: LrSchedule | None
    """Learning-rate schedule of the critic; null: lr_schedule."""
    critic_min_lr_ratio: float | None = key(FROM_0_TO_1)
    """Final learning rate of the critic as a share of its peak; null: min_lr_ratio."""
    critic_warmup_steps: int | None = key(AT_LEAST_0)
    """Warm-up of the critic in optimizer steps; null: warmup_steps."""
    critic_weight_decay: float | None = key(AT_LEAST_0)
    """Weight decay of the critic; null: weight_decay."""
    critic_beta1: float | None = key(FROM_0_BELOW_1)
    """beta1 of the critic; null: beta1."""
    critic_beta2: float | None = key(FROM_0_BELOW_1)
    """beta2 of the critic; null: beta2."""
    eval_prompts: int = key(ABOVE_0)
    """Maximum number of held-out prompts to answer in each evaluation; data=synthetic has 700."""
    eval_every: int = key(AT_LEAST_0)
    """PPO steps between evaluations; 0: only before and after training."""
    sample_every: int = key(ABOVE_0)
    """PPO steps between samples of responses in samples.jsonl."""
    critic_check: CriticCheckConfig = key(affects=NO_PHASE)
    """Checks of the critic against true values, which are sampled (docs/algorithms.md)."""

    @property
    def whitens_advantages(self) -> bool:
        """Return whiten_advantages or, if it is null, the default of the advantage estimator."""
        if self.whiten_advantages is not None:
            return self.whiten_advantages
        return self.advantage_estimator not in COMPARING
