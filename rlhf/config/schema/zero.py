"""Schema and rules of the config group ``zero``: engines, stages, offloading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf.base.errors import refuse_broken_rule
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import Device, MomentsDtype, Phase, TrainingEngine
from rlhf.config.roles import SHARDED_WEIGHTS, Role, setting_unsupported_by_torch, stage_of
from rlhf.config.schema.keys import (
    ABOVE_0,
    AT_LEAST_0,
    FROZEN_STAGE,
    ZERO_STAGE,
    Names,
    format_value,
    key,
)

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig
    from rlhf.options import ZeroConfig

# Our key that sets an entry of DeepSpeed's config, which zero.extra therefore must not set.
KEY_BY_ENTRY: Mapping[str, str] = read_yaml_beside(__file__, "deepspeed_entries.yaml")
FROZEN_ROLES = (Role.reference, Role.reward)
MAX_BF16_BETA2 = 0.99  # a larger beta2 changes a second moment by less than bf16 can store


@dataclass(kw_only=True)
class ZeroKeys:
    """Keys for the training engine, and for DeepSpeed's sharding and offloading of the models."""

    engine: TrainingEngine
    """auto: plain torch on one rank if no key requires DeepSpeed, otherwise deepspeed."""
    moments: MomentsDtype
    """Precision of AdamW's moments: fp32, or bf16, which halves them (engine=torch only)."""
    auto: bool
    """Use stages, offloading and micro-batches of the fastest plan that fits."""
    stage: int = key(ZERO_STAGE)
    """ZeRO stage. 0: shard nothing; 1: optimizer states; 2: also gradients; 3: also weights."""
    critic_stage: int | None = key(ZERO_STAGE)
    """Stage of critic and reward model in PPO; null: stage."""
    reference_stage: int | None = key(FROZEN_STAGE)
    """Stage of the reference, 0 or 3; null: 3 if the actor's stage is 3, otherwise 0."""
    reward_stage: int | None = key(FROZEN_STAGE)
    """Stage of the reward model, 0 or 3; null: 3 if the critic's stage is 3, otherwise 0."""
    offload_optimizer: bool
    """Keep optimizer states and fp32 master weights in the host's memory."""
    offload_parameters: bool
    """Keep the shards of trained weights in the host's memory; stage 3."""
    offload_reference: bool
    """Keep the reference's shards in the host's memory; stage 3."""
    offload_reward: bool
    """Keep the reward model's shards in the host's memory; stage 3."""
    nvme_path: str | None = key(names=Names.place)
    """Folder on an NVMe drive for offloaded states and weights; null: host memory; stage 3."""
    quantize_weights: bool
    """All-gather weights as int8 (ZeRO++ qwZ); stage 3 on GPUs."""
    quantize_gradients: bool
    """Reduce gradients as int4 if there are several nodes (ZeRO++ qgZ); stage 3 on GPUs."""
    hpz_partition_size: int = key(ABOVE_0)
    """GPUs of a node that share a second copy of the weights (ZeRO++ hpZ); 1: no second copy."""
    overlap_comm: bool
    """Reduce gradients during the backward pass."""
    reduce_bucket_size: int | None = key(ABOVE_0)
    """Number of gradient elements to reduce at once; null: DeepSpeed's default."""
    prefetch_bucket_size: int | None = key(ABOVE_0)
    """Number of parameters to gather ahead; null: DeepSpeed's default; stage 3."""
    max_live_parameters: int | None = key(ABOVE_0)
    """Maximum number of gathered parameters on a rank; null: DeepSpeed's default; stage 3."""
    param_persistence_threshold: int | None = key(AT_LEAST_0)
    """Tensors of fewer elements stay whole on every rank; null: DeepSpeed's default; stage 3."""
    memory_efficient_linear: bool
    """Use DeepSpeed's linear function, which keeps less for the backward pass; stage 3."""
    loss_scale_window: int = key(ABOVE_0)
    """fp16: steps without overflow before the loss scale doubles."""
    extra: dict[str, Any]
    """Entries merged last into every DeepSpeed config; for experts."""


def _rules_of_extra_entries(extra: Mapping[str, Any]) -> dict[str, bool]:
    """Return the messages of forbidden entries, each with True if ``zero.extra`` has the entry."""
    reasons = {e: f"{key} sets this entry; use {key} instead" for e, key in KEY_BY_ENTRY.items()}
    reasons["data_types.grad_accum_dtype"] = (
        "DeepSpeed 0.19.8 then trains with an optimizer whose fp32 master weights cannot be "
        "saved; to add gradients in fp32 use zero=stage0, or larger micro-batches"
    )
    return {
        f"zero.extra.{name}={str(value).lower()}: {reason}": value is not None
        for name, reason in reasons.items()
        for value in [_nested_entry(extra, name)]
    }


def check_zero(config: RunConfig) -> None:
    """Check that the stages and the machine support the options of the group ``zero``."""
    zero, hardware, nvme = config.zero, config.hardware, config.zero.nvme_path
    ranks = hardware.nodes * hardware.ranks_per_node
    offloads = ("offload_optimizer", "offload_parameters", "offload_reference", "offload_reward")
    broken = {
        "zero.offload_optimizer=true: requires zero.stage=1, 2 or 3": (
            zero.offload_optimizer and zero.stage == 0
        ),
        **_rules_of_extra_entries(zero.extra),
        **{
            f"zero.{name}={format_value(value)} with "
            f"{', '.join(f'{stage}={n}' for stage, n in stages.items())}: requires sharded "
            f"weights; use {' or '.join(f'{stage}=3' for stage in stages)}, or remove "
            f"zero.{name}": SHARDED_WEIGHTS not in stages.values()
            for name, stages in _stages_of_sharded_keys(zero).items()
            for value in [getattr(zero, name)]
            if (
                value > 1
                if name == "hpz_partition_size"
                else value is not None and value is not False
            )
        },
        f"zero.reduce_bucket_size={zero.reduce_bucket_size}: requires zero.stage=1, 2 or 3": (
            zero.reduce_bucket_size is not None and not (zero.stage or zero.critic_stage)
        ),
        f"zero.nvme_path={nvme}: nothing is offloaded; use zero=stage3_nvme, or set one of the "
        "keys zero.offload_*": nvme is not None and not any(getattr(zero, k) for k in offloads),
        **{
            f"zero.nvme_path={nvme} with zero.{name}={stage}: optimizer states go to NVMe in "
            f"stage 3 only; use zero.{name}=3, or remove zero.nvme_path": (
                nvme is not None and zero.offload_optimizer and stage not in (None, SHARDED_WEIGHTS)
            )
            for name, stage in (("stage", zero.stage), ("critic_stage", zero.critic_stage))
        },
        **{
            f"zero.{name}=true: quantized communication requires several GPUs, and this run has "
            f"{ranks} rank{'s' if ranks > 1 else ''} on {hardware.device}; use a profile with "
            f"several GPUs, such as hardware=8xa100_80g, or remove zero.{name}": (
                getattr(zero, name) and (hardware.device is not Device.cuda or ranks == 1)
            )
            for name in ("quantize_weights", "quantize_gradients")
        },
        f"zero.hpz_partition_size={zero.hpz_partition_size} does not divide "
        f"hardware.ranks_per_node={hardware.ranks_per_node}": (
            hardware.ranks_per_node % zero.hpz_partition_size > 0
        ),
    }
    refuse_broken_rule(broken)


def _nested_entry(node: Any, name: str) -> Any:
    """Return the entry with the dotted ``name`` in nested mappings; None if there is no entry."""
    for part in name.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _stages_of_sharded_keys(zero: ZeroConfig) -> dict[str, dict[str, int]]:
    """Return, for each key that requires sharded weights, the stages that may shard them."""
    trained = {"zero.stage": zero.stage}
    others = {f"{role}_stage": getattr(zero, f"{role}_stage") for role in ("critic", *FROZEN_ROLES)}
    anywhere = trained | {f"zero.{key}": n for key, n in others.items() if n is not None}
    return {
        "offload_parameters": trained,
        **{f"offload_{r}": {f"zero.{r}_stage": stage_of(r, zero)} for r in FROZEN_ROLES},
        "quantize_weights": trained,
        "quantize_gradients": trained,
        "quantize_frozen_weights": trained,
        "hpz_partition_size": trained,
        "prefetch_bucket_size": anywhere,
        "max_live_parameters": anywhere,
        "param_persistence_threshold": anywhere,
    }


def check_training_engine(config: RunConfig) -> None:
    """Check that zero.engine supports the settings; the engine itself checks its precision."""
    zero, order = config.zero, config.phase.order
    ranks = config.hardware.nodes * config.hardware.ranks_per_node
    obstacle = setting_unsupported_by_torch(zero, ranks=ranks)
    not_on_torch = "zero.engine=deepspeed" if zero.engine is TrainingEngine.deepspeed else obstacle
    beta2s = {f"{phase}.beta2": getattr(config, phase).beta2 for phase in order}
    if Phase.ppo in order:
        beta2s["ppo.critic_beta2"] = config.ppo.critic_beta2 or 0.0
    is_bf16 = zero.moments is MomentsDtype.bf16
    broken = {
        f"zero.engine=torch with {obstacle}: plain torch runs one rank without offloading; use "
        "zero.engine=auto": zero.engine is TrainingEngine.torch and obstacle is not None,
        f"zero.moments=bf16 with {not_on_torch}: only zero.engine=torch supports bf16 moments; use "
        f"zero.moments=fp32, or change {not_on_torch}": is_bf16 and not_on_torch is not None,
        **{
            f"zero.moments=bf16 with zero.{key}=0: stage 0 keeps weights and moments in fp32; use "
            "zero=stage1, which costs nothing on one rank, or zero.moments=fp32": (
                is_bf16 and stage == 0
            )
            for key, stage in (("stage", zero.stage), ("critic_stage", zero.critic_stage))
        },
        **{
            f"{key}={beta2} with zero.moments=bf16: steps of the second moment would be lost to "
            f"rounding; use {key}={MAX_BF16_BETA2} or less, or zero.moments=fp32": (
                is_bf16 and beta2 > MAX_BF16_BETA2
            )
            for key, beta2 in beta2s.items()
        },
    }
    refuse_broken_rule(broken)
