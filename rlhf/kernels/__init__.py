"""Kernels that compute faster than torch: in C for CPUs, in Triton for GPUs."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.kernels.checked import CheckedKernels


@cache
def kernels_for(device: str) -> CheckedKernels:
    """Return the kernels for a type of device.

    Each is compared with torch before its first use: on GPUs by default, on CPUs only with
    hardware.kernels=checked.
    """
    from rlhf.kernels.checked import CheckedKernels

    if device == "cuda":
        from rlhf.kernels.gpu import gpu_kernels

        return CheckedKernels(gpu_kernels, "cuda")
    from rlhf.kernels.cpu import cpu_kernels

    return CheckedKernels(cpu_kernels, "cpu")
