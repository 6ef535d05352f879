"""What each number of the configuration may be by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter

from rlhf.config.schema import RunConfig
from rlhf.errors import ConfigError

# What is admitted, and the keys that it is admitted for. null is left to the types.
RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "above 0": (
        lambda x: x > 0,
        (
            "hardware.nodes",
            "hardware.ranks_per_node",
            "hardware.max_micro_batch_size",
            "sft.lr",
            "sft.epochs",
            "sft.batch_size",
            "sft.micro_batch_size",
            "sft.max_tokens",
            "sft.eval_examples",
            "reward.lr",
            "reward.epochs",
            "reward.batch_size",
            "reward.micro_batch_size",
            "reward.max_tokens",
            "reward.eval_examples",
            "dpo.lr",
            "dpo.epochs",
            "dpo.batch_size",
            "dpo.micro_batch_size",
            "dpo.max_tokens",
            "dpo.eval_examples",
            "dpo.eval_prompts",
            "dpo.beta",
            "sft.adam_eps",
            "reward.adam_eps",
            "dpo.adam_eps",
            "ppo.adam_eps",
            "ppo.steps",
            "ppo.epochs",
            "ppo.rollout_batch_size",
            "ppo.responses_per_prompt",
            "ppo.mini_batch_size",
            "ppo.micro_batch_size",
            "ppo.ppo_epochs",
            "ppo.kl_target",
            "ppo.kl_horizon",
            "ppo.cliprange_value",
            "ppo.clip_reward_value",
            "ppo.cliprange_high",
            "ppo.reference_score_std",
            "ppo.ptx_batch_size",
            "ppo.stop_update_kl",
            "ppo.lr_guard_kl",
            "ppo.num_layers_unfrozen",
            "ppo.actor_lr",
            "ppo.critic_lr",
            "ppo.eval_prompts",
            "ppo.sample_every",
            "rollout.max_prompt_tokens",
            "rollout.max_response_tokens",
            "rollout.temperature",
            "rollout.eval_temperature",
            "lora.alpha",
            "lora.lr",
            "lora.critic_rank",
            "lora.critic_lr",
            "zero.hpz_partition_size",
            "tracking.log_every",
        ),
    ),
    "0 or more": (
        lambda x: x >= 0,
        (
            "seed",
            "model.vocab_size",
            "reward_model.vocab_size",
            "sft.warmup_steps",
            "sft.weight_decay",
            "sft.max_grad_norm",
            "reward.warmup_steps",
            "reward.weight_decay",
            "reward.max_grad_norm",
            "ppo.kl_ctl",
            "ppo.missing_end_penalty",
            "ppo.warmup_steps",
            "ppo.weight_decay",
            "ppo.max_grad_norm",
            "ppo.entropy_coef",
            "ppo.value_coef",
            "ppo.ptx_coef",
            "ppo.ptx_eval_blocks",
            "ppo.actor_freeze_steps",
            "ppo.num_value_layers",
            "ppo.critic_warmup_steps",
            "ppo.critic_weight_decay",
            "ppo.eval_every",
            "sft.eval_every",
            "reward.eval_every",
            "dpo.eval_every",
            "dpo.warmup_steps",
            "dpo.weight_decay",
            "dpo.max_grad_norm",
            "lora.rank",
            "rollout.top_k",
            "data.size",
        ),
    ),
    "at least 0 and below 1": (
        lambda x: 0 <= x < 1,
        (
            "model.dropout",
            "reward_model.dropout",
            "sft.beta1",
            "sft.beta2",
            "reward.beta1",
            "reward.beta2",
            "ppo.beta1",
            "ppo.beta2",
            "ppo.critic_beta1",
            "ppo.critic_beta2",
            "ppo.cliprange",
            "ppo.ema_beta",
            "ppo.actor_dropout",
            "ppo.critic_dropout",
            "dpo.beta1",
            "dpo.beta2",
            "lora.dropout",
        ),
    ),
    "from 0 to 1": (
        lambda x: 0 <= x <= 1,
        (
            "sft.min_lr_ratio",
            "reward.min_lr_ratio",
            "dpo.min_lr_ratio",
            "ppo.min_lr_ratio",
            "ppo.critic_min_lr_ratio",
            "ppo.lam",
        ),
    ),
    "at least 0 and below 0.5": (lambda x: 0 <= x < 0.5, ("dpo.label_smoothing",)),  # noqa: PLR2004
    "above 1": (lambda x: x > 1, ("ppo.dual_clip",)),
    "any finite number": (lambda _: True, ("ppo.reference_score_mean", "ppo.missing_end_score")),
    "above 0 and at most 1": (lambda x: 0 < x <= 1, ("ppo.gamma", "rollout.top_p")),
    "above 0 and below 1": (lambda x: 0 < x < 1, ("data.eval_share",)),
    "0, 1, 2 or 3": (lambda x: x in range(4), ("zero.stage", "zero.critic_stage")),
}


def check_ranges(config: RunConfig) -> None:
    """Every number by itself."""
    for rule, (holds, keys) in RANGES.items():
        for key in keys:
            value = attrgetter(key)(config)
            if value is not None and not (math.isfinite(value) and holds(value)):
                raise ConfigError(f"{key}={value}: it must be {rule}")
