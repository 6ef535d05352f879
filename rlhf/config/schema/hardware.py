"""Schema and rules of the config group ``hardware``."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Device, Dtype, Kernels, OnOom, When
from rlhf.config.schema.keys import (
    ABOVE_0,
    ABOVE_0_TO_1,
    AT_LEAST_0,
    NO_PHASE,
    ROWS,
    AtResume,
    key,
    needs,
)


@dataclass(kw_only=True)
class HardwareConfig:
    """Keys for the machine: its ranks, their device and precision, and the rates that plans use."""

    device: Device
    """cpu or cuda (GPUs)."""
    nodes: int = key(ABOVE_0, at_resume=AtResume.rounding)
    """Number of machines."""
    ranks_per_node: int = key(ABOVE_0, at_resume=AtResume.rounding)
    """Processes on each node; on GPUs, one per GPU."""
    cores_per_rank: int | None = key(ABOVE_0, at_resume=AtResume.rounding)
    """CPU cores that a rank computes on; null: ranks and sampling processes share them equally."""
    dtype: Dtype
    """auto: bf16 on CPUs with bf16 instructions, else fp32; on GPUs bf16 (fp16 before Ampere)."""
    fp32_logits: When = key(unread=[needs("dtype", "auto", "bf16", "fp16")])
    """Do not round logits to 16 bits; auto: on GPUs, where this costs little."""
    kernels: Kernels = key(at_resume=AtResume.rounding)
    """auto: compare kernels with torch on a GPU first; checked: on a CPU too; off: only torch."""
    batch_size: int = key(ROWS, affects=NO_PHASE, at_resume=AtResume.fixed)
    """Default batch_size of sft (sequences) and of reward and dpo (pairs), over all ranks."""
    max_micro_batch_size: int = key(ROWS, at_resume=AtResume.rounding)
    """Largest micro-batch, in sequences, of a phase whose micro_batch_size is null."""
    keep_freed_memory: bool = key(affects=NO_PHASE)
    """Keep freed memory in the process: faster on a CPU if memory is not short."""
    on_oom: OnOom = key(at_resume=AtResume.rounding)
    """Out of memory: stop, or reduce_micro_batch: continue with smaller micro-batches."""
    name: str = key(affects=NO_PHASE)
    """Name of one node in plans and tables."""
    memory_gib: float | None = key(ABOVE_0, affects=NO_PHASE)
    """Memory in GiB of one GPU, or of a CPU node (its ranks share it); null: this machine's."""
    host_memory_gib: float | None = key(ABOVE_0, affects=NO_PHASE)
    """Host memory of one node in GiB; null: this machine's."""
    peak_tflops: float | None = key(ABOVE_0, affects=NO_PHASE)
    """Peak half-precision TFLOP/s of one GPU or a whole CPU; null: measured once (CPU only)."""
    fp32_tflops: float | None = key(ABOVE_0, affects=NO_PHASE)
    """Peak fp32 TFLOP/s of one GPU or a whole CPU; null: measured once (CPU only)."""
    training_share: float | None = key(ABOVE_0_TO_1, affects=NO_PHASE)
    """Share of the peak that training on many tokens reaches; null: 0.4 of a GPU, 0.85 of a CPU."""
    memory_bandwidth_gb: float | None = key(ABOVE_0, affects=NO_PHASE)
    """GB/s that one GPU or a whole CPU reads from its memory; null: measured once (CPU only)."""
    link_bandwidth_gb: float = key(ABOVE_0, affects=NO_PHASE)
    """GB/s that a rank sends to the other ranks of its node."""
    network_bandwidth_gb: float = key(ABOVE_0, affects=NO_PHASE)
    """GB/s that one node sends to the other nodes."""
    host_bandwidth_gb: float = key(ABOVE_0, affects=NO_PHASE)
    """GB/s between a GPU and its host's memory, in one direction."""
    nvme_bandwidth_gb: float = key(ABOVE_0, affects=NO_PHASE)
    """GB/s that the NVMe drives of a node read."""
    price_per_hour: float | None = key(AT_LEAST_0, affects=NO_PHASE)
    """Price of one node in US dollars per hour; null: unknown."""

    @property
    def keeps_fp32_logits(self) -> bool:
        """Return True if logits of 16-bit models are not rounded to 16 bits."""
        if self.fp32_logits is When.auto:
            return self.device is Device.cuda
        return self.fp32_logits is When.always


def check_hardware(hardware: HardwareConfig) -> None:
    """Check that the rates of GPUs are given: this program measures only the rates of a CPU."""
    broken = {
        f"hardware.{key}=null: only rates of a CPU are measured; give the GPU's figure, see "
        "conf/hardware/template.yaml": (
            hardware.device is Device.cuda and getattr(hardware, key) is None
        )
        for key in ("peak_tflops", "fp32_tflops", "memory_bandwidth_gb")
    }
    refuse_broken_rule(broken)
