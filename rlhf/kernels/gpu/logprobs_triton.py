"""The Triton kernels of logprobs_gpu.py: one program for each row of logits, one pass over it.

The kernels compute in fp32. A row has ``size`` logits; ``size`` is arbitrary. If ``stride``, the
distance of two rows, is a multiple of 16, the kernels read and write 16 bytes at a time, the
padding behind each row included.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)  # the largest finite fp32 number
LEAST: tl.constexpr = tl.constexpr(-1e4)  # replaces log 0, so that 0 log 0 = 0; its exp is 0


@triton.jit
def reduce_row_kernel(logits, ids, outs, scale, size, stride, BLOCK: tl.constexpr):
    """Write each row's log-sum-exp, entropy and logit of the token id to the three ``outs``.

    All three are those of scale * logits. The sums of p and of p log p are relative to the largest
    logit so far, and are rescaled when a block exceeds it (Milakov and Gimelshein,
    https://arxiv.org/abs/1805.02867, algorithm 3). The largest logit is clamped to a finite number,
    so that infinities give the result of torch.logsumexp.
    """
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride may exceed 2^31
    logits += row * stride
    largest = -LARGEST
    total, weighted = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(logits + at, at < stride, float("-inf")).to(tl.float32) * scale
        x = tl.where(at < size, x, float("-inf"))
        before, largest = largest, tl.maximum(largest, tl.minimum(tl.max(x), LARGEST))
        change = tl.maximum(before - largest, LEAST)
        weighted = tl.exp(change) * (weighted + change * total)
        total = tl.exp(change) * total
        p = tl.exp(x - largest)
        total += p
        weighted += p * tl.maximum(x - largest, LEAST)
    sum_p = tl.sum(total)
    tl.store(outs[0] + row, largest + tl.log(sum_p))
    entropy = tl.where(sum_p == 0, 0.0, tl.log(sum_p) - tl.sum(weighted) / sum_p)
    tl.store(outs[1] + row, entropy)
    token = tl.load(ids + row)
    is_here = (token >= 0) & (token < size)
    logit = tl.load(logits + token, is_here, 0.0).to(tl.float32)
    tl.store(outs[2] + row, logit * scale, is_here)


@triton.jit
def gradient_kernel(logits, ids, log_sums, slopes, scale, size, stride, BLOCK: tl.constexpr):
    """Overwrite each row of logits with its gradient: slope * scale * (1[id] - p)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    token, log_sum = tl.load(ids + row), tl.load(log_sums + row)
    factor = tl.load(slopes + row) * scale
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(logits + at, at < stride).to(tl.float32) * scale
        slopes_of_block = factor * (tl.where(at == token, 1.0, 0.0) - tl.exp(x - log_sum))
        tl.store(logits + at, slopes_of_block.to(logits.dtype.element_ty), at < stride)
