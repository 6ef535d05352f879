"""The precision of runs on a CPU, shared by the engine and the planner."""

from __future__ import annotations

from rlhf.base.cpu import multiplies_bf16, multiplies_fp16, read_cpu
from rlhf.base.errors import CapabilityError
from rlhf.config.choices import Dtype


def cpu_dtype(dtype: Dtype) -> Dtype:
    """Return ``dtype``, with ``auto`` replaced by the best precision of this CPU.

    Raises:
        CapabilityError: if ``dtype`` is fp16 and this CPU cannot train in it.
    """
    if dtype is Dtype.fp16 and not multiplies_fp16():
        raise CapabilityError(
            f"hardware.dtype=fp16: {read_cpu().name} has no fp16 arithmetic, and DeepSpeed refuses "
            f"to emulate it; use hardware.dtype=auto, which is {cpu_dtype(Dtype.auto)} here"
        )
    if dtype is not Dtype.auto:
        return dtype
    return Dtype.bf16 if multiplies_bf16() else Dtype.fp32
