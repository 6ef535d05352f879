"""What a model does in a run, and what its ZeRO stage and precision are."""

from __future__ import annotations

from enum import StrEnum

from rlhf.config.choices import Dtype
from rlhf.config.machine_schema import ZeroConfig

SHARDED_WEIGHTS = 3  # the ZeRO stage that shards the weights too


class Role(StrEnum):
    """What a model does in a run; a frozen model has no optimiser."""

    sft = "sft"
    actor = "actor"
    critic = "critic"
    reward_training = "reward_training"
    reference = "reference"
    reward = "reward"

    @property
    def is_frozen(self) -> bool:
        """True where the model is only read."""
        return self in (Role.reference, Role.reward)


def stage_of(role: Role, zero: ZeroConfig) -> int:
    """ZeRO stage of a model: a frozen one has only parameters to shard, so it takes 3 or 0."""
    own = {Role.reference: zero.reference_stage, Role.reward: zero.reward_stage}.get(role)
    if own is not None:
        return own
    stage = _stage_of_family(role, zero)
    return 0 if role.is_frozen and stage != SHARDED_WEIGHTS else stage


def _stage_of_family(role: Role, zero: ZeroConfig) -> int:
    """The stage of the trained model: reward model and critic may have their own."""
    if role in (Role.critic, Role.reward) and zero.critic_stage is not None:
        return zero.critic_stage
    return zero.stage


def has_half_weights(role: Role, zero: ZeroConfig, dtype: Dtype) -> bool:
    """True where weights are kept in half precision, beside fp32 masters in the sharded optimiser.

    A frozen model takes the precision of the weights that are trained in its family.

    Stage 0 has no such optimiser: there bf16 computes by autocast on fp32 weights, which are their
    own masters. (DeepSpeed 0.19.8 would wrap a client optimiser at stage 0 in its unfused fp16
    optimiser, whose steps differ from those of every other stage.)
    """
    return dtype in (Dtype.fp16, Dtype.bf16) and _stage_of_family(role, zero) > 0
