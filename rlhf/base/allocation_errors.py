"""Failed allocations of memory, in every form in which torch and CUDA report them."""

from __future__ import annotations

import torch

# What failed allocations say that have no class of their own: of torch's allocator on a CPU, and of
# CUDA's driver, cuBLAS, cuDNN and NCCL.
MESSAGES = (
    *("can't allocate memory", "not enough memory", "out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error``, or one that it followed, says that an allocation failed.

    An allocation that fails while a CUDA graph is captured comes out as an error of the capture.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES):
        return True
    earlier = error.__cause__ or error.__context__
    return earlier is not None and is_out_of_memory(earlier)
