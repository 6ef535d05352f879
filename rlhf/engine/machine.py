"""What this process computes on, found at run time."""

from __future__ import annotations

import os

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rlhf.config.choices import Device, Dtype
from rlhf.config.cpu import has_amx
from rlhf.errors import CapabilityError
from rlhf.types import Ranks


def resolve_dtype(dtype: Dtype, device: Device) -> Dtype:
    """The precision that ``auto`` stands for here; any other stays.

    On a CPU bf16 pays where AMX multiplies it; without AMX it is slower than fp32.
    """
    if dtype is not Dtype.auto:
        return dtype
    if device is Device.cuda:
        return Dtype.bf16 if torch.cuda.is_bf16_supported() else Dtype.fp16
    return Dtype.bf16 if has_amx() else Dtype.fp32


def current_ranks(device: Device) -> Ranks:
    """This process among the ranks that are running; alone where no process group was started.

    Raises:
        CapabilityError: CUDA is asked for and not there.
    """
    if device is Device.cuda and not torch.cuda.is_available():
        raise CapabilityError(
            "hardware.device=cuda: torch finds no GPU here; "
            "use hardware=cpu, or install a CUDA build of torch and check nvidia-smi"
        )
    # DeepSpeed chooses its accelerator and its local rank from the environment, at its first
    # import.
    os.environ["DS_ACCELERATOR"] = device.value
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    if device is Device.cuda:
        torch.cuda.set_device(local_rank)
    distributed = torch.distributed
    if not distributed.is_initialized():
        backend = "nccl" if device is Device.cuda else "gloo"
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    place = torch.device(device.value, local_rank) if device is Device.cuda else torch.device("cpu")
    return Ranks(distributed.get_rank(), distributed.get_world_size(), place)
