"""The Triton kernel of attention_gpu.py: one program for each row and key/value head.

A program reads the keys and values of its row only, block by block, and holds one block at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(newest, kv_cache, positions, out, strides, SIZES: tl.constexpr, BLOCK: tl.constexpr):
    """Store the newest key and value at the row's position; write the row's attention to ``out``.

    ``newest`` are queries, keys and values. ``strides`` are their token and head strides, then the
    strides of ``kv_cache`` from keys to values and from head to head. SIZES are the query heads per
    key head and the head size, then both rounded up to powers of two. The newest key and value are
    used first, from registers, so that the loop over the KV cache need not wait for their store.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)  # int64: offsets may exceed 2^31
    group, at = tl.arange(0, SIZES[2]), tl.arange(0, SIZES[3])
    heads, is_part = (head * SIZES[0] + group)[:, None], at < SIZES[1]
    is_query = (group < SIZES[0])[:, None] & is_part[None, :]
    position = tl.load(positions + row)
    keys = kv_cache + (row * tl.num_programs(1) + head) * strides[7]
    values = keys + strides[6]
    q = tl.load(newest[0] + row * strides[0] + heads * strides[1] + at[None, :], is_query, 0.0)
    k = tl.load(newest[1] + row * strides[2] + head * strides[3] + at, is_part, 0.0)
    v = tl.load(newest[2] + row * strides[4] + head * strides[5] + at, is_part, 0.0)
    tl.store(keys + position * SIZES[1] + at, k, is_part)
    tl.store(values + position * SIZES[1] + at, v, is_part)
    scale = SIZES[1] ** -0.5
    largest = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
    total = tl.full([SIZES[2]], 1.0, tl.float32)
    mixed = tl.full([SIZES[2], SIZES[3]], 0.0, tl.float32) + v.to(tl.float32)[None, :]
    for first in range(0, position, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_earlier, place = column < position, column * SIZES[1]
        k_block = tl.load(
            keys + place[None, :] + at[:, None], is_earlier[None, :] & is_part[:, None], 0.0
        )
        v_block = tl.load(
            values + place[:, None] + at[None, :], is_earlier[:, None] & is_part[None, :], 0.0
        )
        scores = tl.dot(q, k_block, input_precision="ieee") * scale
        scores = tl.where(is_earlier[None, :], scores, float("-inf"))
        # Online softmax: sums are relative to the largest score so far (arxiv.org/abs/1805.02867).
        before, largest = largest, tl.maximum(largest, tl.max(scores, 1))
        change, p = tl.exp(before - largest), tl.exp(scores - largest[:, None])
        total = total * change + tl.sum(p, 1)
        added = tl.dot(p.to(v_block.dtype), v_block, input_precision="ieee")
        mixed = mixed * change[:, None] + added
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    query_heads = row * tl.num_programs(1) * SIZES[0] + heads
    tl.store(out + query_heads * SIZES[1] + at[None, :], mixed, is_query)
