"""Rules between the keys of ZeRO: what needs sharded weights, NVMe or several GPUs."""

from __future__ import annotations

from typing import Any

from rlhf.config.choices import Device, Dtype, Phase
from rlhf.config.machine_schema import ZeroConfig
from rlhf.config.roles import SHARDED_WEIGHTS, Role, stage_of
from rlhf.config.schema import RunConfig
from rlhf.errors import ConfigError

# Entries of DeepSpeed's JSON that zero.extra may not set, and our keys that decide them.
DECIDED = {
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.offload_optimizer.device": "zero.offload_optimizer",
    "zero_optimization.offload_param.device": "zero.offload_parameters",
    "train_batch_size": "PHASE.batch_size",
    "train_micro_batch_size_per_gpu": "PHASE.micro_batch_size",
    "gradient_accumulation_steps": "PHASE.micro_batch_size",
    "gradient_clipping": "PHASE.max_grad_norm",
    "bf16.enabled": "hardware.dtype",
    "fp16.enabled": "hardware.dtype",
}


def check_extra(zero: ZeroConfig) -> None:
    """Refuse entries of zero.extra that a key of ours decides."""
    for name, key in DECIDED.items():
        node: Any = zero.extra
        for part in name.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node is not None:
            raise ConfigError(
                f"zero.extra.{name}={str(node).lower()}: {key} decides this; set {key} instead"
            )


def check_sharded_keys(zero: ZeroConfig) -> None:
    """Each key that is about sharded weights has a model whose weights are."""
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
            text = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(
                f"zero.{key}={text}: it needs {' or '.join(found)}=3, where weights are sharded, "
                f"and that is {', '.join(map(str, found.values()))}"
            )
    if zero.reduce_bucket_size is not None and not (zero.stage or zero.critic_stage):
        raise ConfigError(
            f"zero.reduce_bucket_size={zero.reduce_bucket_size}: it needs zero.stage=1, 2 or 3"
        )


def check_nvme(config: RunConfig) -> None:
    """What goes to NVMe is sharded, and nothing else reads it."""
    zero = config.zero
    if zero.nvme_path is None:
        return
    offloads = ("offload_optimizer", "offload_parameters", "offload_reference", "offload_reward")
    if not any(getattr(zero, key) for key in offloads):
        raise ConfigError(
            f"zero.nvme_path={zero.nvme_path}: it is for what is offloaded, and nothing is; use "
            "zero=stage3_nvme, or one of zero.offload_*"
        )
    for key, stage in (("stage", zero.stage), ("critic_stage", zero.critic_stage)):
        if zero.offload_optimizer and stage not in (None, SHARDED_WEIGHTS):
            raise ConfigError(
                f"zero.nvme_path={zero.nvme_path} with zero.{key}={stage}: optimiser states go to "
                f"NVMe in stage 3 only; use zero.{key}=3, or leave zero.nvme_path out"
            )
    if zero.offload_optimizer and config.ppo.ema_beta and Phase.ppo in config.phase.order:
        raise ConfigError(
            f"zero.nvme_path={zero.nvme_path} with ppo.ema_beta={config.ppo.ema_beta}: the moving "
            "average reads the fp32 weights, which are on NVMe; use ppo.ema_beta=0, or leave "
            "zero.nvme_path out"
        )


def check_quantized(config: RunConfig) -> None:
    """ZeRO++ packs what GPUs send to one another; MixZ++ what adapters leave frozen, in fp16."""
    zero, hardware = config.zero, config.hardware
    ranks = hardware.nodes * hardware.ranks_per_node
    for key in ("quantize_weights", "quantize_gradients"):
        if getattr(zero, key) and (hardware.device is not Device.cuda or ranks == 1):
            raise ConfigError(
                f"zero.{key}=true: it packs what GPUs send to one another, and there are {ranks} "
                f"ranks on {hardware.device}; use a profile of several GPUs, such as "
                "hardware=8xa100_80g, or leave it out"
            )
    if not zero.quantize_frozen_weights:
        return
    if not config.lora.rank or hardware.device is not Device.cuda:
        raise ConfigError(
            "zero.quantize_frozen_weights=true: it is for the frozen weights below adapters, on "
            "GPUs; add lora=default and a GPU profile of hardware"
        )
    if hardware.dtype is not Dtype.fp16:
        raise ConfigError(
            f"zero.quantize_frozen_weights=true with hardware.dtype={hardware.dtype}: DeepSpeed "
            "quantises fp16 weights only; use hardware.dtype=fp16"
        )
