"""Find the device, precision and rank of this process; check that the machine supports them."""

from __future__ import annotations

import os

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rlhf.config.choices import Device, Dtype
from rlhf.config.precision import cpu_dtype
from rlhf.config.schema.hardware import HardwareConfig
from rlhf.errors import CapabilityError
from rlhf.types import Ranks

BF16_CAPABILITY = (8, 0)  # the first GPUs with bf16 arithmetic (Ampere); older ones emulate it


def resolve_dtype(dtype: Dtype, device: Device) -> Dtype:
    """Return ``dtype``, with ``auto`` replaced by the best precision of this machine.

    Raises:
        CapabilityError: if this machine cannot compute in ``dtype``.
    """
    if device is Device.cpu:
        return cpu_dtype(dtype)
    has_bf16 = torch.version.hip is not None or (
        torch.cuda.get_device_capability() >= BF16_CAPABILITY
    )
    if dtype is Dtype.bf16 and not has_bf16:
        raise CapabilityError(
            f"hardware.dtype=bf16: {torch.cuda.get_device_name()} only emulates bf16; use "
            "hardware.dtype=fp16, or hardware.dtype=auto, which is fp16 here"
        )
    if dtype is not Dtype.auto:
        return dtype
    return Dtype.bf16 if has_bf16 else Dtype.fp16


def check_machine(hardware: HardwareConfig) -> None:
    """Check that this machine has the devices that ``hardware`` names and supports its precision.

    Raises:
        CapabilityError: if a node has fewer GPUs than ranks, or lacks the precision.
    """
    if hardware.device is Device.cuda:
        check_gpus(hardware.ranks_per_node)
    resolve_dtype(hardware.dtype, hardware.device)


def check_gpus(ranks_per_node: int) -> None:
    """Check that torch finds one GPU for each rank of this node.

    Raises:
        CapabilityError: if torch finds fewer.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= ranks_per_node:
        return
    if not found:
        raise CapabilityError(
            "hardware.device=cuda: torch finds no GPU here; use hardware=cpu, or install a CUDA "
            "build of torch and check nvidia-smi (plan=only needs no GPU)"
        )
    raise CapabilityError(
        f"hardware.ranks_per_node={ranks_per_node}: torch finds {found} GPU{'s' * (found > 1)} "
        f"here, and each rank needs its own; use hardware.ranks_per_node={found}, or check "
        "CUDA_VISIBLE_DEVICES"
    )


def current_ranks(device: Device) -> Ranks:
    """Return this process's rank, world size and device; start a process group if there is none.

    Raises:
        CapabilityError: if this rank has no GPU of its own and ``device`` is cuda.
    """
    # DeepSpeed reads its accelerator and local rank from the environment at its first import.
    os.environ["DS_ACCELERATOR"] = device.value
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    if device is Device.cuda:
        check_gpus(local_rank + 1)
        torch.cuda.set_device(local_rank)
    distributed = torch.distributed
    if not distributed.is_initialized():
        backend = "nccl" if device is Device.cuda else "gloo"
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    place = torch.device(device.value, local_rank) if device is Device.cuda else torch.device("cpu")
    return Ranks(distributed.get_rank(), distributed.get_world_size(), place)
