"""Attention of one new token per row over a KV cache on a GPU; no row is read past its length.

Shapes: B = rows, Q = query heads, K = key/value heads, D = head size, M = pages of the KV cache, G
= pages of a row, L = columns of a page, C = chunks of a row's columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LEAST_SIZE = 16  # smallest number of rows and of columns of a matrix product on tensor cores
BLOCK_BYTES = 2**14  # bytes of keys, and bytes of values, that a program holds at a time
CHUNK = 512  # columns per partial result; writing it adds 0.8 % to reading Llama 3's KV cache
PROGRAMS = 4  # programs wanted per multiprocessor; an H100 runs up to three at the same time
WARPS = 4
FUSED = {"enable_fp_fusion": True}  # Triton warns if this is not set: the default changes in 3.10


def count_shared_pages(rows: int, tokens: int, mean_tokens: int) -> int:
    """Return the number of pages for rows of ``mean_tokens`` tokens, or of one with ``tokens``."""
    return max(rows * -(-mean_tokens // CHUNK), -(-tokens // CHUNK))


@dataclass
class GpuAttention:
    """The attention kernels of attention_triton.py, called with torch's tensors.

    With few rows, several programs share the chunks of a row, which changes no result. In all, at
    least ``programs`` run (if None, enough for the whole GPU), but no more than one per chunk.
    """

    kernels: ModuleType
    programs: int | None = None
    chunk: int = CHUNK
    block_bytes: int = BLOCK_BYTES

    def __call__(
        self,
        query_BQD: Tensor,
        key_BKD: Tensor,
        value_BKD: Tensor,
        kv_cache_2MKLD: Tensor,
        pages_BG: Tensor,
        positions_B: Tensor,
        columns: int,
    ) -> Tensor:
        """Store keys and values at ``positions_B`` of a KV cache; return attention (B, Q, D).

        Rows have one page each, or pages of ``chunk`` columns. The queries of a row attend to the
        row's columns up to its position, inclusive, but not from ``columns`` on. If these are a
        single chunk, its result is written at once, without a second kernel. Scores are divided by
        the square root of D.
        """
        rows, num_heads, size = query_BQD.shape
        num_kv_heads, page_columns = kv_cache_2MKLD.shape[2:4]
        chunks = -(-columns // self.chunk)
        newest = (query_BQD, key_BKD, value_BKD)
        assert kv_cache_2MKLD[0].is_contiguous()
        assert pages_BG.shape[1] == 1 or page_columns == self.chunk
        assert positions_B.is_contiguous()
        assert pages_BG.stride(1) == 1
        assert all(each.stride(2) == 1 for each in newest)
        dtype = torch.float32 if chunks > 1 else query_BQD.dtype
        means_BQCD = query_BQD.new_empty(rows, num_heads, chunks, size, dtype=dtype)
        log_sums_BQC = query_BQD.new_empty(means_BQCD.shape[:3], dtype=torch.float32)
        parts = (means_BQCD, log_sums_BQC)
        strides = [each.stride(axis) for each in newest for axis in (0, 1)]
        strides += [kv_cache_2MKLD.stride(axis) for axis in (0, 2)]
        constants = choose_kernel_constants(
            num_heads // num_kv_heads,
            size,
            query_BQD.dtype,
            self.chunk,
            self.block_bytes,
            is_paged=pages_BG.shape[1] > 1,
        )
        programs = self.programs
        if programs is None:
            gpu = torch.cuda.get_device_properties(query_BQD.device)
            programs = PROGRAMS * gpu.multi_processor_count
        programs_per_row = min(chunks, -(-programs // (rows * num_kv_heads)))
        self.kernels.attend[rows, num_kv_heads, programs_per_row](
            newest,
            kv_cache_2MKLD,
            pages_BG,
            positions_B,
            parts,
            (*strides, chunks, pages_BG.stride(0)),
            **constants,
            num_warps=WARPS,
            **FUSED,
        )
        if chunks == 1:
            return means_BQCD.squeeze(2)
        out_BQD = query_BQD.new_empty(rows, num_heads, size)
        self.kernels.combine[rows, num_heads](
            parts, positions_B, out_BQD, chunks, SIZES=constants["SIZES"], num_warps=1, **FUSED
        )
        return out_BQD


@cache
def choose_kernel_constants(
    group: int,
    size: int,
    dtype: torch.dtype,
    chunk: int = CHUNK,
    block_bytes: int = BLOCK_BYTES,
    *,
    is_paged: bool,
) -> dict[str, Any]:
    """Return the kernels' compile-time constants for ``group`` query heads per key/value head."""
    padded = [max(LEAST_SIZE, 1 << (each - 1).bit_length()) for each in (group, size)]
    block = min(chunk, max(LEAST_SIZE, block_bytes // (padded[1] * dtype.itemsize)))
    return {"SIZES": (group, size, *padded, chunk, int(is_paged)), "BLOCK": block}
