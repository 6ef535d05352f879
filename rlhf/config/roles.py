"""Roles of the models in a run, and the ZeRO stage and precision that follow from a role."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from rlhf.config.choices import Dtype, ModelInit, Phase, RewardKind, TrainingEngine

if TYPE_CHECKING:
    from rlhf.config.schema.model import ModelConfig
    from rlhf.config.schema.run import RunConfig
    from rlhf.options import ZeroConfig

SHARDED_WEIGHTS = 3  # the ZeRO stage that also shards the weights
OFFLOAD_KEYS = ("offload_optimizer", "offload_parameters", "offload_reference", "offload_reward")
QUANTIZATION_KEYS = ("quantize_weights", "quantize_gradients", "quantize_frozen_weights")


class Role(StrEnum):
    """The role of a model in a run; a frozen model has no optimizer."""

    sft = "sft"
    actor = "actor"
    critic = "critic"
    reward_training = "reward_training"
    reference = "reference"
    reward = "reward"

    @property
    def is_frozen(self) -> bool:
        """Return True if the model is never trained."""
        return self in (Role.reference, Role.reward)


def stage_of(role: Role, zero: ZeroConfig) -> int:
    """Return the ZeRO stage of the model ``role``; a frozen model's is 3 (sharded weights) or 0."""
    stage = _stage_of_trained_model(role, zero)
    if not role.is_frozen:
        return stage
    set_stage = zero.reference_stage if role is Role.reference else zero.reward_stage
    if set_stage is not None:
        return set_stage
    return stage if stage == SHARDED_WEIGHTS else 0


def _stage_of_trained_model(role: Role, zero: ZeroConfig) -> int:
    """Return the critic's stage for the critic and the reward model, else the common stage."""
    if role in (Role.critic, Role.reward) and zero.critic_stage is not None:
        return zero.critic_stage
    return zero.stage


def has_16_bit_weights(role: Role, zero: ZeroConfig, dtype: Dtype) -> bool:
    """Return True if weights are half-precision, with fp32 masters in the sharded optimizer.

    The reference has the precision of the actor, and the reward model the critic's precision.

    Stage 0 has no sharded optimizer: bf16 then computes by autocast on fp32 weights, which are
    their own masters. (DeepSpeed 0.19.8 would wrap a client optimizer at stage 0 in its unfused
    fp16 optimizer, whose steps differ from the steps of every other stage.)
    """
    return dtype in (Dtype.fp16, Dtype.bf16) and _stage_of_trained_model(role, zero) > 0


def has_reward_model(config: RunConfig) -> bool:
    """Return True if a reward model scores responses, alone or as a part of ``rewards``."""
    if config.rewards:
        return any(part.kind == RewardKind.model for part in config.rewards.values())
    return config.reward_model.init is not ModelInit.gold


def reward_key_by_column(config: RunConfig) -> dict[str, str]:
    """Return, for each data column that a part of the score reads, the key that names the column.

    Columns that the reward model's loss reads are included; their keys begin with ``reward.``.
    """
    key_by_column = {
        column: f"rewards.{name}.columns"
        for name, part in config.rewards.items()
        for column in part.columns
    }
    if Phase.reward in config.phase.order:
        key_by_column |= dict.fromkeys(config.reward.score_columns or (), "reward.score_columns")
        if config.reward.margin_column is not None:
            key_by_column[config.reward.margin_column] = "reward.margin_column"
    return key_by_column


def reward_model_base(config: RunConfig) -> tuple[str, ModelConfig]:
    """Return the key and value of the config group of the model that initialises the reward model.

    The critic starts from this model too. The group is ``model`` if both start from the SFT model,
    or if the run has no reward model.
    """
    if config.reward_model.init.starts_from_sft or not has_reward_model(config):
        return "model", config.model
    return "reward_model", config.reward_model


def given_reward_model(config: RunConfig) -> ModelConfig | None:
    """Return the group ``reward_model`` if the run uses it and it is pretrained, otherwise None."""
    key, model = reward_model_base(config)
    is_read = key == "reward_model" and not {Phase.reward, Phase.ppo}.isdisjoint(config.phase.order)
    return model if is_read and model.init is ModelInit.pretrained else None


def starting_models(config: RunConfig, phase: Phase) -> list[tuple[str, ModelConfig]]:
    """Return the config keys and values of the models whose weights ``phase`` starts from."""
    model = ("model", config.model)
    reward_model = reward_model_base(config)
    return {
        Phase.sft: [model],
        Phase.dpo: [model],
        Phase.reward: [reward_model],
        Phase.ppo: [model, reward_model],
    }[phase]


def tokenizer_base(config: RunConfig) -> tuple[str, ModelConfig]:
    """Return the key and value of the config group of the model whose tokenizer the run uses.

    The group is ``model``, or if only a reward model is trained, the group that initialises it.
    """
    if config.phase.order == [Phase.reward]:
        return reward_model_base(config)
    return "model", config.model


def setting_unsupported_by_torch(
    zero: ZeroConfig, *, ranks: int, dtype: Dtype | None = None, needs_deepspeed: str | None = None
) -> str | None:
    """Return the first setting that plain torch does not support, as key=value, or None.

    ``needs_deepspeed`` is a setting outside of ``zero`` that needs DeepSpeed, or None. If ``dtype``
    is None, precision is not checked.
    """
    if needs_deepspeed is not None:
        return needs_deepspeed
    if dtype is Dtype.fp16:
        return "hardware.dtype=fp16"
    for key in (*OFFLOAD_KEYS, *QUANTIZATION_KEYS):
        if getattr(zero, key):
            return f"zero.{key}=true"
    if zero.hpz_partition_size > 1:
        return f"zero.hpz_partition_size={zero.hpz_partition_size}"
    if zero.extra:
        return f"zero.extra={zero.extra}"
    return f"hardware.nodes*hardware.ranks_per_node={ranks}" if ranks > 1 else None


def runs_on_torch(
    zero: ZeroConfig, *, ranks: int, dtype: Dtype, needs_deepspeed: str | None = None
) -> bool:
    """Return True if plain torch runs a model: DeepSpeed is neither chosen nor required."""
    obstacle = setting_unsupported_by_torch(
        zero, ranks=ranks, dtype=dtype, needs_deepspeed=needs_deepspeed
    )
    return obstacle is None and zero.engine is not TrainingEngine.deepspeed
