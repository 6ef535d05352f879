"""What PPO and its rollouts can be told; ``schema`` holds the other groups."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.choices import (
    AdvantageEstimator,
    Backend,
    KlEstimator,
    KlPlacement,
    LossAggregation,
    LrSchedule,
    ScaleReward,
    When,
)

# Estimators that compare the responses of one prompt.
COMPARING = (AdvantageEstimator.rloo, AdvantageEstimator.grpo)


@dataclass(kw_only=True)
class PpoConfig:
    """Proximal policy optimisation against the reward model."""

    steps: int | None
    """Policy update rounds, at most: each samples one rollout and learns from it; null: no cap."""
    epochs: float | None
    """Passes over the prompts, at most; null: no cap."""
    rollout_batch_size: int
    """Responses sampled per step."""
    responses_per_prompt: int
    """Responses sampled for each prompt; the advantage estimators rloo and grpo compare them."""
    mini_batch_size: int
    """Sequences per optimiser step."""
    micro_batch_size: int | None
    """Sequences that one rank runs at once; null: as many as the hardware allows."""
    ppo_epochs: int
    """Passes over a rollout."""
    kl_ctl: float
    """Reward subtracted per nat of KL(policy || reference); where it starts, when it adapts."""
    kl_target: float | None
    """KL in nats per sequence that kl_ctl is steered to; null: kl_ctl is fixed."""
    kl_horizon: int
    """Sequences over which an adaptive kl_ctl corrects itself."""
    kl_estimator: KlEstimator
    kl_placement: KlPlacement
    cliprange: float
    """The policy ratio is held in [1 - cliprange, 1 + cliprange]."""
    cliprange_high: float | None
    """Another upper end, 1 + cliprange_high (DAPO); null: the same as below."""
    dual_clip: float | None
    """The loss of a token with negative advantage A is at most -dual_clip * A; null: unbounded."""
    cliprange_value: float | None
    """A value moves at most this far from its old one; null: not clipped."""
    scale_reward: ScaleReward
    scale_reward_shift: bool
    """Subtract the scores' mean too before they are divided by their deviation."""
    reference_score_mean: float | None
    """Mean of scale_reward=reference; null: that of the first rollout's scores."""
    reference_score_std: float | None
    """Deviation of scale_reward=reference; null: that of the first rollout's scores."""
    clip_reward_value: float | None
    """Scores are clipped to [-clip_reward_value, clip_reward_value]; null: not clipped."""
    missing_end_penalty: float
    """Subtracted from the clipped score of a response that never ended."""
    missing_end_score: float | None
    """Takes the place of the score of a response that never ended; null: it keeps its own."""
    advantage_estimator: AdvantageEstimator
    gamma: float
    """Discount per token."""
    lam: float
    """Lambda of generalised advantage estimation."""
    whiten_advantages: bool | None
    """Shift and scale advantages to mean 0 and deviation 1 over the whole rollout; null: with gae
    and reinforce_pp only, since rloo and grpo compare the responses of a group already."""
    whiten_rewards: bool
    """Scale rewards to deviation 1 over the whole rollout, keeping their mean."""
    loss_aggregation: LossAggregation
    """token_mean: every token of a mini-batch counts alike; sequence_mean: every response does."""
    entropy_coef: float
    """Weight of the policy's entropy in nats, a bonus; 0: none."""
    value_coef: float
    """Weight of the critic's loss."""
    ptx_coef: float
    """Weight of the language-model loss on data.ptx_path (InstructGPT's gamma); 0: none."""
    ptx_batch_size: int | None
    """Corpus blocks per optimiser step; null: as many as mini_batch_size."""
    ptx_eval_blocks: int
    """Held-out blocks of data.ptx_path for the perplexity, at most; 0: not measured."""
    ema_beta: float
    """Share that the actor's moving average keeps at each optimiser step; 0: no average."""
    actor_freeze_steps: int
    """First steps in which only the critic learns."""
    stop_update_kl: float | None
    """The rest of a rollout's updates is left out once KL(old || new) per token passes it."""
    lr_guard_kl: float | None
    """The actor's learning rate falls while KL(old || new) per token is above it; null: never."""
    align_overflow: bool
    """Skip the step of both engines where the fp16 gradients of one overflow."""
    shared_trunk: bool
    """Critic and reference are branches of the actor's own trunk (trlx's hydra model)."""
    num_layers_unfrozen: int | None
    """Top layers that the shared trunk trains; the reference is a frozen copy of them."""
    num_value_layers: int
    """Top layers that the critic of a shared trunk has for itself; 0: a head alone."""
    actor_dropout: float
    """Dropout in the actor's updates; log-probabilities of rollouts are always taken without."""
    critic_dropout: float
    """Dropout in the critic's updates."""
    actor_lr: float
    """Peak learning rate of the policy."""
    critic_lr: float
    """Peak learning rate of the critic."""
    lr_schedule: LrSchedule
    min_lr_ratio: float
    warmup_steps: int
    """Optimiser steps over which both learning rates rise."""
    weight_decay: float
    beta1: float
    beta2: float
    adam_eps: float
    max_grad_norm: float
    critic_lr_schedule: LrSchedule | None
    """null: as lr_schedule."""
    critic_min_lr_ratio: float | None
    """null: as min_lr_ratio."""
    critic_warmup_steps: int | None
    """null: as warmup_steps."""
    critic_weight_decay: float | None
    """null: as weight_decay."""
    critic_beta1: float | None
    """null: as beta1."""
    critic_beta2: float | None
    """null: as beta2."""
    eval_prompts: int
    """Held-out prompts that are answered before and after training, at most."""
    eval_every: int
    """Steps between evaluations; 0: before and after training only."""
    sample_every: int
    """Steps between samples written to samples.jsonl."""

    @property
    def whitens_advantages(self) -> bool:
        """Return what whiten_advantages says, or else what belongs to the advantage estimator."""
        if self.whiten_advantages is not None:
            return self.whiten_advantages
        return self.advantage_estimator not in COMPARING


@dataclass(kw_only=True)
class HybridEngineConfig:
    """DeepSpeed's Hybrid Engine, with backend hybrid_engine (docs/hybrid_engine.md)."""

    max_out_tokens: int | None
    """Tokens of prompt and response that its cache holds; null: the maxima of both together."""
    inference_tp_size: int
    """Ranks that share one copy of the weights while they generate; above 1 at stage 3 only."""
    release_inference_cache: bool
    """Free its cache after each rollout: slower, smaller."""
    pin_parameters: bool
    """Keep its buffers for inference in place between rollouts."""
    tp_gather_partition_size: int
    """Layers that are gathered together at stage 3."""
    enable_cuda_graph: bool
    """Replay its kernels as CUDA graphs; not at stage 3."""


@dataclass(kw_only=True)
class RolloutConfig:
    """How responses are sampled."""

    backend: Backend
    """fast: this project's decode loop; hf: Hugging Face's generate; hybrid_engine: DeepSpeed's."""
    max_prompt_tokens: int
    """Longer prompts are left out and counted."""
    max_response_tokens: int
    """A response is cut off here."""
    temperature: float
    """Logits are divided by it before sampling."""
    top_k: int
    """Sample among the k likeliest tokens; 0: all."""
    top_p: float
    """Sample among the likeliest tokens that hold this share of probability; 1: all."""
    eval_temperature: float | None
    """Temperature of evaluations; null: the same."""
    min_response_tokens: int
    """The end token cannot come before this many tokens are there; 0: at once."""
    stop: list[str]
    """Texts that end a response as the end token does; they stay in it."""
    max_rows: int | None
    """Responses that a rank decodes at once, others wait for a place; null: all of its share."""
    reuse_logprobs: When
    """auto: while they agree with those of training; backend fast only."""
    max_logprob_mismatch: float
    """Mean difference per token, in nats, up to which auto takes the rollout's log-probs."""
    gather_weights: When
    """ZeRO-3's shards: gathered once per rollout, or layer by layer; auto: once where they fit."""
    cuda_graphs: bool
    """Replay decode steps as CUDA graphs; on a GPU with backend fast."""
    hybrid_engine: HybridEngineConfig
