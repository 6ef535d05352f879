"""Rules for the config group ``zero``: engines, stages, offloading, shared sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.base.errors import ConfigError, refuse_first
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import Device, Dtype, MomentsDtype, Phase, TrainingEngine
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
    """Check that states on NVMe are offloaded and sharded, and that no other feature reads them."""
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
    if zero.offload_optimizer and config.ppo.ema_beta and Phase.ppo in config.phase.order:
        raise ConfigError(
            f"zero.nvme_path={zero.nvme_path} with ppo.ema_beta={config.ppo.ema_beta}: the moving "
            "average reads the fp32 weights, which are on NVMe; use ppo.ema_beta=0, or remove "
            "zero.nvme_path"
        )


def check_quantization(config: RunConfig) -> None:
    """Check that ZeRO++ quantization runs on several GPUs, and MixZ++ on GPUs in fp16 with LoRA."""
    zero, hardware = config.zero, config.hardware
    ranks = hardware.nodes * hardware.ranks_per_node
    for key in ("quantize_weights", "quantize_gradients"):
        if getattr(zero, key) and (hardware.device is not Device.cuda or ranks == 1):
            raise ConfigError(
                f"zero.{key}=true: quantized communication requires several GPUs, and this run has "
                f"{ranks} rank{'s' if ranks > 1 else ''} on {hardware.device}; use a profile "
                f"of several GPUs, such as hardware=8xa100_80g, or remove zero.{key}"
            )
    if not zero.quantize_frozen_weights:
        return
    broken = {
        "zero.quantize_frozen_weights=true: requires LoRA, whose frozen weights it quantizes, and "
        "GPUs; add lora=default and a GPU profile of hardware": (
            not config.lora.rank or hardware.device is not Device.cuda
        ),
        f"zero.quantize_frozen_weights=true with hardware.dtype={hardware.dtype}: DeepSpeed "
        "quantizes fp16 weights only; use hardware.dtype=fp16": hardware.dtype is not Dtype.fp16,
    }
    refuse_first(broken)


ATTENTIONS = (None, "matmul", "sdpa")  # causal without a mask: no rank has the mask of all tokens
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
    if zero.offload_ema and not config.ppo.ema_beta:
        raise ConfigError(
            f"zero.offload_ema=true with ppo.ema_beta={config.ppo.ema_beta}: there is no moving "
            "average; add ppo.ema_beta=0.992, or remove zero.offload_ema"
        )
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


def check_sequence_parallel(config: RunConfig) -> None:
    """Check phases, ranks per node and attention if several ranks share the same sequences."""
    size, per_node = config.zero.sequence_parallel_size, config.hardware.ranks_per_node
    if size == 1:
        return
    order, attention = config.phase.order, config.model.attention
    broken = {
        f" with phase.order=[{','.join(order)}]: only SFT shares sequences between ranks, because "
        "the other phases compare whole sequences or sample them on one rank; use phase=sft, then "
        "start the other phases with from_run and without this key; there, smaller micro-batches, "
        "model.gradient_checkpointing=true and zero=stage3 save memory": order != [Phase.sft],
        f" does not divide hardware.ranks_per_node={per_node}: the ranks that share a sequence "
        "must be on one node": per_node % size > 0,
        f" with model.attention={attention}: sequences are shared only with model.attention=matmul "
        "or sdpa; use one of them, or remove zero.sequence_parallel_size": (
            attention not in ATTENTIONS
        ),
    }
    refuse_first(broken, f"zero.sequence_parallel_size={size}")
