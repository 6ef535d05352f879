"""Check that DeepSpeed's CUDA kernels, which nvcc compiles at first use, are available."""

from __future__ import annotations

import torch

from rlhf.base.errors import CapabilityError
from rlhf.config.schema.zero import ZeroConfig


def require_quantizer(zero: ZeroConfig) -> None:
    """Raise CapabilityError if ``zero`` needs the quantizer, and it cannot be compiled here."""
    keys = ("quantize_weights", "quantize_gradients", "quantize_frozen_weights")
    used = [f"zero.{key}=true" for key in keys if getattr(zero, key)]
    if used and (obstacle := op_unavailable_reason("QuantizerBuilder")) is not None:
        raise CapabilityError(f"{', '.join(used)}: {obstacle}; or run without this option")


def op_unavailable_reason(builder: str) -> str | None:
    """Return why the kernels of DeepSpeed's op ``builder`` are not available; None if they are."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops import op_builder
    from deepspeed.ops.op_builder.builder import (
        CUDAMismatchException,
        MissingCUDAException,
        assert_no_cuda_mismatch,
    )

    if not torch.cuda.is_available():
        return "DeepSpeed has these kernels for GPUs only; use one, and install the CUDA toolkit"
    op = getattr(op_builder, builder)()
    if installed_ops.get(op.name):
        return None
    try:
        if not op.is_compatible(verbose=False):
            return f"DeepSpeed's kernels ({op.name}) do not fit this GPU or CUDA"
        assert_no_cuda_mismatch(op.name)
    except (MissingCUDAException, CUDAMismatchException, OSError) as error:
        return (
            f"DeepSpeed's kernels ({op.name}) cannot be compiled here: {str(error).lstrip('>- ')}; "
            "install the CUDA toolkit of the version that torch was built with (nvcc, CUDA_HOME)"
        )
    return None
