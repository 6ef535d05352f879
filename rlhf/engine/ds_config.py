"""DeepSpeed's configuration as a pure function of ours."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from rlhf.config.checks import BatchPlan
from rlhf.config.choices import Dtype
from rlhf.config.machine_schema import ZeroConfig
from rlhf.config.roles import SHARDED_WEIGHTS, Role, has_half_weights, stage_of


def deepspeed_config(
    role: Role, *, zero: ZeroConfig, dtype: Dtype, plan: BatchPlan, max_grad_norm: float
) -> dict[str, Any]:
    """The DeepSpeed JSON of one model.

    ``dtype`` is resolved (never auto). ``zero.extra`` is merged last, key by key, into nested
    sections.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro,
        "gradient_accumulation_steps": 1 if role.is_frozen else plan.accumulation,
        "zero_optimization": _zero_section(role, zero),
        "steps_per_print": 2**31,  # metrics are ours to print
    }
    if not role.is_frozen:
        config["gradient_clipping"] = max_grad_norm
        config["zero_allow_untested_optimizer"] = True  # torch.optim.AdamW, no compiler needed
        config["zero_force_ds_cpu_optimizer"] = False  # the same, where states are offloaded
    if has_half_weights(role, zero, dtype):
        section = "bf16" if dtype is Dtype.bf16 else "fp16"
        config[section] = {"enabled": True}
    return _merged(config, zero.extra)


def _zero_section(role: Role, zero: ZeroConfig) -> dict[str, Any]:
    stage = stage_of(role, zero)
    section: dict[str, Any] = {"stage": stage}
    if not role.is_frozen and stage > 0:
        section |= {"overlap_comm": True, "contiguous_gradients": True}
        if zero.offload_optimizer:
            section["offload_optimizer"] = {"device": "cpu"}
    if stage != SHARDED_WEIGHTS:
        return section
    offloads = {Role.reference: zero.offload_reference, Role.reward: zero.offload_reward}
    if offloads.get(role, zero.offload_parameters):
        section["offload_param"] = {"device": "cpu"}
    if zero.quantize_frozen_weights:
        section["zero_quantized_nontrainable_weights"] = True
    if zero.hpz_partition_size > 1:
        section["zero_hpz_partition_size"] = zero.hpz_partition_size
    return section


def _merged(config: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = deepcopy(config)
    for key, value in extra.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = value
    return merged
