"""What a run can be told of its machine; ``schema`` holds the other groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf.config.choices import Device, Dtype, Moments, TrainingEngine


@dataclass(kw_only=True)
class HardwareConfig:
    """The machine: how many ranks, on what, in which precision."""

    device: Device
    """cpu or cuda."""
    nodes: int
    """Machines."""
    ranks_per_node: int
    """Processes on each node; on GPUs one per GPU."""
    dtype: Dtype
    """auto: on a CPU bf16 if it multiplies bf16, else fp32; on a GPU bf16, before Ampere fp16."""
    batch_size: int
    """Sequences (pairs) of an optimiser step in sft, reward and dpo, where these do not say."""
    max_micro_batch_size: int
    """Sequences that one rank runs at once, where a phase does not say."""
    keep_freed_memory: bool
    """Keep freed memory in the process: faster on a CPU, where it is not short."""
    name: str
    """What plans and tables call one node of it."""
    memory_gib: float | None
    """Memory of one GPU; on a CPU what the ranks of a node share, null: this machine's."""
    host_memory_gib: float | None
    """The host's memory of one node; null: this machine's."""
    peak_tflops: float | None
    """Dense matrix products of one GPU, or of a whole CPU, in half precision, at best.

    Here and in the next two, null (on a CPU only): measured once on this machine.
    """
    fp32_tflops: float | None
    """The same in fp32."""
    memory_bandwidth_gb: float | None
    """Gigabytes per second (1e9) that one GPU, or a whole CPU, reads from its memory."""
    link_bandwidth_gb: float
    """Gigabytes per second that a rank sends to the others of its node."""
    network_bandwidth_gb: float
    """Gigabytes per second that one node sends to the others."""
    host_bandwidth_gb: float
    """Gigabytes per second between a GPU and its host's memory, in one direction."""
    nvme_bandwidth_gb: float
    """Gigabytes per second that the drives of a node read."""
    price_per_hour: float | None
    """US dollars for one node; null: not known."""


@dataclass(kw_only=True)
class ZeroConfig:
    """How DeepSpeed shards the trained models."""

    engine: TrainingEngine
    """auto: plain torch on one rank, where there is nothing to shard; else deepspeed."""
    moments: Moments
    """AdamW's moments; bf16 halves them (engine torch only)."""
    auto: bool
    """Take stages, offloading and micro-batches of the fastest plan that fits (docs/planner.md)."""
    stage: int
    """0: nothing; 1: optimiser states; 2: and gradients; 3: and parameters."""
    critic_stage: int | None
    """Stage of critic and reward model in PPO; null: the same."""
    reference_stage: int | None
    """0 or 3; null: 3 where the actor's is 3."""
    reward_stage: int | None
    """0 or 3; null: 3 where the critic's is 3."""
    offload_optimizer: bool
    """Keep optimiser states and fp32 masters in the host's memory."""
    offload_parameters: bool
    """Keep the shards of trained weights in the host's memory; stage 3."""
    offload_reference: bool
    """Keep the reference's shards in the host's memory; stage 3."""
    offload_reward: bool
    """Keep the reward model's shards in the host's memory; stage 3."""
    offload_ema: bool
    """Keep the moving average of the actor's weights in the host's memory."""
    nvme_path: str | None
    """Folder on an NVMe drive, where what is offloaded goes instead; stage 3."""
    quantize_weights: bool
    """Gather weights as int8 (ZeRO++ qwZ); stage 3 on GPUs."""
    quantize_gradients: bool
    """Reduce gradients as int4 within nodes, int8 between (ZeRO++ qgZ); stage 3 on GPUs."""
    quantize_frozen_weights: bool
    """Gather frozen weights as int8 (MixZ++); stage 3 with LoRA, on GPUs."""
    hpz_partition_size: int
    """GPUs that share a second copy of the weights (ZeRO++ hpZ), those of a node; 1: none."""
    overlap_comm: bool
    """Reduce gradients while the backward pass goes on."""
    reduce_bucket_size: int | None
    """Gradients reduced at once, in elements; null: DeepSpeed's default."""
    prefetch_bucket_size: int | None
    """Parameters gathered ahead, in elements; stage 3; null: DeepSpeed's default."""
    max_live_parameters: int | None
    """Gathered parameters that a rank holds, at most; stage 3; null: DeepSpeed's default."""
    param_persistence_threshold: int | None
    """Parameters of fewer elements stay whole on every rank; stage 3; null: DeepSpeed's default."""
    memory_efficient_linear: bool
    """DeepSpeed's own linear function, which keeps less for the backward pass; stage 3."""
    loss_scale_window: int
    """fp16: steps without overflow until the loss scale doubles."""
    extra: dict[str, Any]
    """Merged last into every DeepSpeed config; for experts."""


@dataclass(kw_only=True)
class LauncherConfig:
    """How the ranks are started (docs/launching.md)."""

    dry_run: bool
    """Print the command that would start the ranks, and stop."""
    hostfile: str | None
    """Nodes and slots for the DeepSpeed launcher; null: this node, or the nodes of a SLURM job."""
    master_addr: str | None
    """Address of the first node; null: found."""
    master_port: int
    """Port on it where the ranks of several nodes meet."""
    timeout_minutes: float
    """Time that ranks wait for one another, data preparation included."""
