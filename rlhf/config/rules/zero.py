"""Rules for the config group ``zero``: engines, stages, offloading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.base.errors import ConfigError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import Device, MomentsDtype, Phase, TrainingEngine
from rlhf.config.roles import SHARDED_WEIGHTS, Role, setting_unsupported_by_torch, stage_of
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import format_value
from rlhf.options import ZeroConfig

DECIDED: Mapping[str, str] = read_yaml_beside(__file__, "deepspeed_entries.yaml")


def check_extra_entries(zero: ZeroConfig) -> None:
    """Raise ConfigError if zero.extra sets an entry of DeepSpeed that one of our keys sets."""
    for name, key in DECIDED.items():
        node: Any = zero.extra
        for part in name.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node is not None:
            raise ConfigError(
                f"zero.extra.{name}={str(node).lower()}: {key} sets this entry; use {key} instead"
            )


def check_sharded_keys(zero: ZeroConfig) -> None:
    """Check that each key for sharded weights (stage 3) applies to a model with sharded weights."""
    trained = {"zero.stage": zero.stage}
    anywhere = trained | {
        f"zero.{key}": getattr(zero, key)
        for key in ("critic_stage", "reference_stage", "reward_stage")
        if getattr(zero, key) is not None
    }
    stages = {
        "offload_parameters": trained,
        "offload_reference": {"zero.reference_stage": stage_of(Role.reference, zero)},
        "offload_reward": {"zero.reward_stage": stage_of(Role.reward, zero)},
        "quantize_weights": trained,
        "quantize_gradients": trained,
        "quantize_frozen_weights": trained,
        "hpz_partition_size": trained,
        "prefetch_bucket_size": anywhere,
        "max_live_parameters": anywhere,
        "param_persistence_threshold": anywhere,
    }
    for key, found in stages.items():
        value = getattr(zero, key)
        is_given = (
            value > 1 if key == "hpz_partition_size" else value is not None and value is not False
        )
        if is_given and SHARDED_WEIGHTS not in found.values():
            stages_now = ", ".join(f"{name}={stage}" for name, stage in found.items())
            raise ConfigError(
                f"zero.{key}={format_value(value)} with {stages_now}: requires sharded weights; "
                f"use {' or '.join(f'{name}=3' for name in found)}, or remove zero.{key}"
            )
    if zero.reduce_bucket_size is not None and not (zero.stage or zero.critic_stage):
        raise ConfigError(
            f"zero.reduce_bucket_size={zero.reduce_bucket_size}: requires zero.stage=1, 2 or 3"
        )


def check_nvme(config: RunConfig) -> None:
    """Check that states on NVMe are offloaded and sharded."""
    zero = config.zero
    if zero.nvme_path is None:
        return
    offloads = ("offload_optimizer", "offload_parameters", "offload_reference", "offload_reward")
    if not any(getattr(zero, key) for key in offloads):
        raise ConfigError(
            f"zero.nvme_path={zero.nvme_path}: nothing is offloaded; use "
            "zero=stage3_nvme, or set one of the keys zero.offload_*"
        )
    for key, stage in (("stage", zero.stage), ("critic_stage", zero.critic_stage)):
        if zero.offload_optimizer and stage not in (None, SHARDED_WEIGHTS):
            raise ConfigError(
                f"zero.nvme_path={zero.nvme_path} with zero.{key}={stage}: optimizer states go to "
                f"NVMe in stage 3 only; use zero.{key}=3, or remove zero.nvme_path"
            )


def check_quantization(config: RunConfig) -> None:
    """Check that ZeRO++ quantization runs on several GPUs."""
    zero, hardware = config.zero, config.hardware
    ranks = hardware.nodes * hardware.ranks_per_node
    for key in ("quantize_weights", "quantize_gradients"):
        if getattr(zero, key) and (hardware.device is not Device.cuda or ranks == 1):
            raise ConfigError(
                f"zero.{key}=true: quantized communication requires several GPUs, and this run has "
                f"{ranks} rank{'s' if ranks > 1 else ''} on {hardware.device}; use a profile "
                f"of several GPUs, such as hardware=8xa100_80g, or remove zero.{key}"
            )


ROUGH_BETA2 = 0.99  # above this, a step changes a second moment less than bf16 can store


def check_zero(config: RunConfig) -> None:
    """Check that the stages and the machine support the options of the group ``zero``."""
    zero = config.zero
    if zero.offload_optimizer and zero.stage == 0:
        raise ConfigError("zero.offload_optimizer=true: requires zero.stage=1, 2 or 3")
    check_extra_entries(zero)
    check_sharded_keys(zero)
    check_nvme(config)
    check_quantization(config)
    if config.hardware.ranks_per_node % zero.hpz_partition_size:
        raise ConfigError(
            f"zero.hpz_partition_size={zero.hpz_partition_size} does not divide "
            f"hardware.ranks_per_node={config.hardware.ranks_per_node}"
        )


def check_training_engine(config: RunConfig) -> None:
    """Check that zero.engine supports the options; the engine checks the precision when built."""
    zero = config.zero
    ranks = config.hardware.nodes * config.hardware.ranks_per_node
    obstacle = setting_unsupported_by_torch(zero, ranks=ranks)
    if zero.engine is TrainingEngine.torch and obstacle is not None:
        raise ConfigError(
            f"zero.engine=torch with {obstacle}: plain torch runs one rank without offloading; "
            "use zero.engine=auto"
        )
    if zero.moments is MomentsDtype.bf16:
        _check_half_moments(config, obstacle)


def _check_half_moments(config: RunConfig, obstacle: str | None) -> None:
    zero = config.zero
    if zero.engine is TrainingEngine.deepspeed:
        obstacle = "zero.engine=deepspeed"
    if obstacle is not None:
        raise ConfigError(
            f"zero.moments=bf16 with {obstacle}: only zero.engine=torch supports bf16 moments; "
            f"use zero.moments=fp32, or change {obstacle}"
        )
    for key, stage in (("stage", zero.stage), ("critic_stage", zero.critic_stage)):
        if stage == 0:
            raise ConfigError(
                f"zero.moments=bf16 with zero.{key}=0: stage 0 keeps weights and moments in fp32; "
                "use zero=stage1, which costs nothing on one rank, or zero.moments=fp32"
            )
    trained = {
        Phase.sft: {"sft.beta2": config.sft.beta2},
        Phase.reward: {"reward.beta2": config.reward.beta2},
        Phase.dpo: {"dpo.beta2": config.dpo.beta2},
        Phase.ppo: {
            "ppo.beta2": config.ppo.beta2,
            "ppo.critic_beta2": config.ppo.critic_beta2 or 0.0,
        },
    }
    for phase in config.phase.order:
        for key, beta2 in trained[phase].items():
            if beta2 > ROUGH_BETA2:
                raise ConfigError(
                    f"{key}={beta2} with zero.moments=bf16: steps of the second moment would be "
                    f"lost to rounding; use {key}={ROUGH_BETA2} or less, or zero.moments=fp32"
                )
