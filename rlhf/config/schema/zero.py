"""Schema of the config group ``zero``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf.config.choices import MomentsDtype, TrainingEngine
from rlhf.config.schema.keys import ABOVE_0, AT_LEAST_0, FROZEN_STAGE, ZERO_STAGE, key


@dataclass(kw_only=True)
class ZeroKeys:
    """Training engine, and DeepSpeed's sharding and offloading of the models."""

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
    nvme_path: str | None
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
