"""Check that DeepSpeed's own CUDA kernels, which nvcc compiles at their first use, can be had."""

from __future__ import annotations

from rlhf.config.choices import Backend
from rlhf.config.schema.run import RunConfig


def kernel_obstacle(config: RunConfig) -> str | None:
    """Return which option of ``config`` needs kernels that cannot be had here, and why; or None.

    A run would otherwise end where it uses them first: in PPO, after the phases before it.
    """
    zero = config.zero
    users = {
        "rollout.backend=hybrid_engine": (
            config.rollout.backend is Backend.hybrid_engine,
            "InferenceBuilder",
        ),
        "zero.quantize_weights=true": (zero.quantize_weights, "QuantizerBuilder"),
        "zero.quantize_gradients=true": (zero.quantize_gradients, "QuantizerBuilder"),
        "zero.quantize_frozen_weights=true": (zero.quantize_frozen_weights, "QuantizerBuilder"),
    }
    for option, (is_used, builder) in users.items():
        if is_used and (reason := compile_obstacle(builder)) is not None:
            return f"{option}: {reason}"
    return None


def compile_obstacle(builder: str) -> str | None:
    """Return why the kernels of DeepSpeed's op builder of this name cannot be had here, or None."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops import op_builder
    from deepspeed.ops.op_builder.builder import (
        CUDAMismatchException,
        MissingCUDAException,
        assert_no_cuda_mismatch,
    )

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
            "they need the CUDA toolkit of the version that torch was built with (nvcc, CUDA_HOME)"
        )
    return None
