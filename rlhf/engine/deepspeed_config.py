"""DeepSpeed's config as a pure function of this project's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from omegaconf import OmegaConf

from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Dtype
from rlhf.config.roles import SHARDED_WEIGHTS, Role, has_16_bit_weights, stage_of
from rlhf.options import ZeroConfig


def deepspeed_config(
    role: Role,
    *,
    zero: ZeroConfig,
    dtype: Dtype,
    plan: BatchPlan,
    max_grad_norm: float,
    ranks: int,
    actor_sections: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Return the DeepSpeed JSON config of one model.

    ``dtype`` is resolved (never auto); ``ranks`` is the number of ranks of the whole run;
    ``actor_sections`` are further sections for the actor's config. Keys that are null are omitted,
    so that DeepSpeed's defaults apply. Last, each key of ``zero.extra``, also in nested sections,
    is added to the config or replaces the value there.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro,
        "gradient_accumulation_steps": 1 if role.is_frozen else plan.accumulation,
        "zero_optimization": _zero_section(role, zero, ranks),
        "steps_per_print": 2**31,  # practically never: rlhf prints the metrics itself
        "wall_clock_breakdown": False,
        "prescale_gradients": False,
    }
    if not role.is_frozen:
        config["gradient_clipping"] = max_grad_norm
        config["zero_allow_untested_optimizer"] = True  # torch's AdamW needs no compiler
        config["zero_force_ds_cpu_optimizer"] = False  # allow torch's AdamW with offloading too
    if role is Role.actor:
        config |= actor_sections
    if has_16_bit_weights(role, zero, dtype):
        config[dtype.value] = {"enabled": True}
        if dtype is Dtype.fp16:
            config["fp16"]["loss_scale_window"] = zero.loss_scale_window
        elif not role.is_frozen:
            config["bf16"]["check_grad_overflow"] = True  # DeepSpeed checks by default since 0.19.3
    return cast("dict[str, Any]", OmegaConf.to_object(OmegaConf.merge(config, zero.extra)))


def _zero_section(role: Role, zero: ZeroConfig, ranks: int) -> dict[str, Any]:
    stage = stage_of(role, zero)
    section: dict[str, Any] = {"stage": stage}
    if not role.is_frozen and stage > 0:
        section |= {"overlap_comm": zero.overlap_comm, "contiguous_gradients": True}
        section |= _drop_nulls(reduce_bucket_size=zero.reduce_bucket_size)
        if zero.offload_optimizer:
            section["offload_optimizer"] = _offload_section(role, zero)
    if stage != SHARDED_WEIGHTS:
        return section
    offloads = {Role.reference: zero.offload_reference, Role.reward: zero.offload_reward}
    if offloads.get(role, zero.offload_parameters):
        section["offload_param"] = _offload_section(role, zero)
    section["memory_efficient_linear"] = zero.memory_efficient_linear
    section |= _drop_nulls(
        stage3_prefetch_bucket_size=zero.prefetch_bucket_size,
        stage3_max_live_parameters=zero.max_live_parameters,
        stage3_param_persistence_threshold=zero.param_persistence_threshold,
        zero_quantized_weights=zero.quantize_weights or None,
    )
    if not role.is_frozen:
        section |= _drop_nulls(
            zero_quantized_nontrainable_weights=zero.quantize_frozen_weights or None,
            zero_quantized_gradients=zero.quantize_gradients or None,
        )
    # If all ranks form one group, the secondary shards would equal the primary shards.
    if 1 < zero.hpz_partition_size < ranks:
        section["zero_hpz_partition_size"] = zero.hpz_partition_size
    return section


def _drop_nulls(**values: int | None) -> dict[str, int]:
    return {key: value for key, value in values.items() if value is not None}


def _offload_section(role: Role, zero: ZeroConfig) -> dict[str, Any]:
    """Return the section that sends offloaded tensors to the host's memory or to NVMe."""
    if zero.nvme_path is None:
        return {"device": "cpu", "pin_memory": True}
    # One folder per model: DeepSpeed 0.19.8 empties its folder when an engine starts.
    return {"device": "nvme", "nvme_path": f"{zero.nvme_path}/{role}", "pin_memory": True}
