"""Recognise out-of-memory errors in every form in which torch and CUDA report them."""

from __future__ import annotations

import torch

# Some out-of-memory errors are plain RuntimeErrors, recognized by these parts of their messages:
# errors of torch's CPU allocator, and of CUDA's driver, cuBLAS, cuDNN and NCCL.
MESSAGES = (
    *("can't allocate memory", "not enough memory", "out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cublasCreate found no free GPU memory
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",  # from torch's allocator if GPU memory is full
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error``, or an earlier error that led to it, is a failed allocation.

    If an allocation fails while a CUDA graph is captured, torch raises an error about the capture,
    whose ``__context__`` is the error of the failed allocation.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES):
        return True
    earlier = error.__cause__ or error.__context__
    return earlier is not None and is_out_of_memory(earlier)
