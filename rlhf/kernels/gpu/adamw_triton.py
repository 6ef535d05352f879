"""The Triton kernels of adamw_gpu.py; one launch works on all tensors of a list.

Each program works on one chunk of a tensor: a row (tensor, start, end) of ``chunks``. It finds the
data of tensor t in row t of ``addresses``, an int64 table whose entries are multiples of ALIGN.
Whole blocks are read without a mask, because only such reads become 16 bytes wide.

An update does not depend on the GPU: division and square root are rounded as IEEE 754 requires, the
caller forbids fused multiply-adds, and bf16 is rounded with integers, because Triton's interpreter
truncates.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_squares_kernel(addresses, chunks, sums, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of the squares of each chunk of the bf16 gradients to ``sums``."""
    tensor, start, whole, end = _load_chunk(chunks, BLOCK)
    gradient = _load_pointer(addresses + tensor, tl.int16, ALIGN)
    end = tl.where(tl.load(addresses + tensor) == 0, start, end)  # address 0: no gradient
    whole = tl.minimum(whole, end)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, whole - start, BLOCK):
        numbers = _bf16_to_fp32(tl.load(gradient + (start + first + tl.arange(0, BLOCK))))
        total += numbers * numbers
    at = whole + tl.arange(0, BLOCK)
    numbers = _bf16_to_fp32(tl.load(gradient + at, at < end, 0))
    tl.store(sums + tl.program_id(0), tl.sum(total + numbers * numbers))


@triton.jit
def adamw_step_kernel(
    addresses, chunks, scalars, HALF: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Take an AdamW step on this program's chunk of one tensor.

    Columns of ``addresses``: gradient, high, low, first and second moment. HALF: moments are bf16.
    """
    tensor, start, whole, end = _load_chunk(chunks, BLOCK)
    row, numbers = addresses + 5 * tensor, scalars + 8 * tensor
    end = tl.where(tl.load(row) == 0, start, end)  # address 0: no gradient
    whole = tl.minimum(whole, end)
    for first in range(0, whole - start, BLOCK):
        _update_weights(row, numbers, start + first + tl.arange(0, BLOCK), None, HALF, ALIGN)
    if whole < end:
        at = whole + tl.arange(0, BLOCK)
        _update_weights(row, numbers, at, at < end, HALF, ALIGN)


@triton.jit
def average_kernel(addresses, chunks, share, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Add share * (weight - average) to averages; ``addresses`` has columns average, high, low."""
    tensor, start, whole, end = _load_chunk(chunks, BLOCK)
    row, new = addresses + 3 * tensor, tl.load(share)
    for first in range(0, whole - start, BLOCK):
        _update_average(row, start + first + tl.arange(0, BLOCK), None, new, ALIGN)
    if whole < end:
        at = whole + tl.arange(0, BLOCK)
        _update_average(row, at, at < end, new, ALIGN)


@triton.jit
def _update_weights(row, numbers, at, mask, HALF: tl.constexpr, ALIGN: tl.constexpr):
    """Update the weights at the indices ``at``, by the operations of torch's AdamW, in order."""
    scale, new1 = tl.load(numbers), tl.load(numbers + 1)
    beta2, new2, correction2 = tl.load(numbers + 2), tl.load(numbers + 3), tl.load(numbers + 4)
    eps, keep, rate = tl.load(numbers + 5), tl.load(numbers + 6), tl.load(numbers + 7)
    moments: tl.constexpr = tl.int16 if HALF else tl.float32
    high = _load_pointer(row + 1, tl.int16, ALIGN) + at
    low = _load_pointer(row + 2, tl.int16, ALIGN) + at
    first = _load_pointer(row + 3, moments, ALIGN) + at
    second = _load_pointer(row + 4, moments, ALIGN) + at
    gradient = _bf16_to_fp32(tl.load(_load_pointer(row, tl.int16, ALIGN) + at, mask)) * scale
    m, v = tl.load(first, mask), tl.load(second, mask)
    if HALF:
        m, v = _bf16_to_fp32(m), _bf16_to_fp32(v)
    m += new1 * (gradient - m)
    v = v * beta2 + new2 * gradient * gradient
    root = tl.sqrt_rn(tl.div_rn(v, correction2)) + eps
    weights = _join_halves(tl.load(high, mask), tl.load(low, mask)) * keep
    weights -= tl.div_rn(rate * m, root)
    bits = weights.to(tl.int32, bitcast=True)
    tl.store(low, bits.to(tl.int16), mask)
    tl.store(high, ((bits + 0x8000) >> 16).to(tl.int16), mask)
    if HALF:
        m, v = _fp32_to_bf16(m), _fp32_to_bf16(v)
    tl.store(first, m, mask)
    tl.store(second, v, mask)


@triton.jit
def _update_average(row, at, mask, new, ALIGN: tl.constexpr):
    mean = _load_pointer(row, tl.float32, ALIGN) + at
    high = tl.load(_load_pointer(row + 1, tl.int16, ALIGN) + at, mask)
    low = tl.load(_load_pointer(row + 2, tl.int16, ALIGN) + at, mask)
    old = tl.load(mean, mask)
    tl.store(mean, old + new * (_join_halves(high, low) - old), mask)


@triton.jit
def _load_chunk(chunks, BLOCK: tl.constexpr):
    """Return this program's chunk as int64: tensor index, start, end of whole blocks, and end."""
    row = chunks + 3 * tl.program_id(0).to(tl.int64)
    start = tl.multiple_of(tl.load(row + 1), BLOCK)
    end = tl.load(row + 2)
    return tl.load(row), start, start + (end - start) // BLOCK * BLOCK, end


@triton.jit
def _load_pointer(entry, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    return tl.multiple_of(tl.load(entry).to(tl.pointer_type(TYPE)), ALIGN)


@triton.jit
def _join_halves(high, low):
    """Return the fp32 numbers with the bits 65536 * high + low."""
    return ((high.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _bf16_to_fp32(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _fp32_to_bf16(numbers):
    """Return the bits of the nearest bf16 numbers; ties go to even."""
    bits = numbers.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
