"""The Triton kernels of attention_gpu.py: attention of one new token per row over a KV cache.

``attend`` reads the keys and values of each row, one chunk of columns after another and one block
of a chunk at a time, and writes a result per chunk; each chunk is in one page of the KV cache.
``combine`` averages these. The chunks of a row depend on its length only, so its result is the same
however many programs share its chunks, wherever its pages are, and whatever other rows there are
(https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE: tl.constexpr = tl.constexpr(16)  # chunks that ``combine`` reads at a time


@triton.jit
def attend(
    newest, kv_cache, pages, positions, parts, strides, SIZES: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the newest key and value at the row's position; write the attention over each chunk.

    ``newest`` are queries, keys and values; ``pages`` are each row's pages of ``kv_cache``.
    ``parts`` are each chunk's mean of the values and log-sum-exp of the scores, in fp32.
    ``strides`` are the token and head strides of ``newest``, the strides of ``kv_cache`` from keys
    to values and from head to head, the number of chunks of a row of ``parts``, and the row stride
    of ``pages``. SIZES are the query heads per key/value head and the head size, then both rounded
    up to powers of two, the columns of a chunk, and 1 if each chunk has a page, 0 if each row has
    one. The newest key and value are part of chunk 0. They come from registers, so that the loop
    need not wait for their store.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)  # int64: offsets may exceed 2^31
    group, at = tl.arange(0, SIZES[2]), tl.arange(0, SIZES[3])
    heads, is_part = (head * SIZES[0] + group)[:, None], at < SIZES[1]
    is_query = (group < SIZES[0])[:, None] & is_part[None, :]
    position = tl.load(positions + row)
    pages += row * strides[9]
    q = tl.load(newest[0] + row * strides[0] + heads * strides[1] + at[None, :], is_query, 0.0)
    k = tl.load(newest[1] + row * strides[2] + head * strides[3] + at, is_part, 0.0)
    v = tl.load(newest[2] + row * strides[4] + head * strides[5] + at, is_part, 0.0)
    keys = kv_cache + (tl.load(pages) * tl.num_programs(1) + head) * strides[7]  # of the first page
    if tl.program_id(2) == 0:
        place = keys + position * SIZES[1]
        if SIZES[5]:
            page = tl.load(pages + position // SIZES[4])
            place = kv_cache + (page * tl.num_programs(1) + head) * strides[7]
            place += position % SIZES[4] * SIZES[1]
        tl.store(place + at, k, is_part)
        tl.store(place + strides[6] + at, v, is_part)
    scale = SIZES[1] ** -0.5
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
    chunks = tl.minimum(tl.maximum(tl.cdiv(position, SIZES[4]), 1), strides[8])
    for chunk in range(tl.program_id(2), chunks, tl.num_programs(2)):
        has_newest = chunk == 0
        largest = tl.where(has_newest, score, float("-inf"))
        total = tl.full([SIZES[2]], 0.0, tl.float32) + tl.where(has_newest, 1.0, 0.0)
        mixed = tl.full([SIZES[2], SIZES[3]], 0.0, tl.float32)
        mixed += tl.where(has_newest, v.to(tl.float32), 0.0)[None, :]
        start = chunk * SIZES[4]
        if SIZES[5]:  # where the key of column 0 would be, if the chunk's page held all columns
            keys = kv_cache + (tl.load(pages + chunk) * tl.num_programs(1) + head) * strides[7]
            keys -= start * SIZES[1]
        values = keys + strides[6]
        for first in range(start, tl.minimum(start + SIZES[4], position), BLOCK):
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
            # Online softmax: sums are relative to the largest score (arxiv.org/abs/1805.02867).
            before, largest = largest, tl.maximum(largest, tl.max(scores, 1))
            change, p = tl.exp(before - largest), tl.exp(scores - largest[:, None])
            total = total * change + tl.sum(p, 1)
            added = tl.dot(p.to(v_block.dtype), v_block, input_precision="ieee")
            mixed = mixed * change[:, None] + added
        place = (row * tl.num_programs(1) * SIZES[0] + heads) * strides[8] + chunk
        tl.store(parts[0] + place * SIZES[1] + at[None, :], mixed / total[:, None], is_query)
        tl.store(parts[1] + place, (largest + tl.log(total))[:, None], (group < SIZES[0])[:, None])


@triton.jit
def combine(parts, positions, out, chunks, SIZES: tl.constexpr):
    """Write the mean over a row's and head's chunks to ``out``, weighted by sums of exp(score).

    ``parts`` and SIZES are those of ``attend``; ``chunks`` is its last stride.
    """
    row, at, tile = tl.program_id(0).to(tl.int64), tl.arange(0, SIZES[3]), tl.arange(0, TILE)
    head = row * tl.num_programs(1) + tl.program_id(1)
    is_part = at < SIZES[1]
    count = tl.maximum(tl.cdiv(tl.load(positions + row), SIZES[4]), 1)
    largest, total = float("-inf"), 0.0
    mixed = tl.full([SIZES[3]], 0.0, tl.float32)
    for first in range(0, count, TILE):
        is_chunk, place = first + tile < count, head * chunks + first + tile
        sums = tl.load(parts[1] + place, is_chunk, float("-inf"))
        means = tl.load(
            parts[0] + place[:, None] * SIZES[1] + at[None, :],
            is_chunk[:, None] & is_part[None, :],
            0.0,
        )
        before, largest = largest, tl.maximum(largest, tl.max(sums))
        change, weights = tl.exp(before - largest), tl.exp(sums - largest)
        total = total * change + tl.sum(weights)
        mixed = mixed * change + tl.sum(weights[:, None] * means, 0)
    tl.store(out + head * SIZES[1] + at, (mixed / total).to(out.dtype.element_ty), is_part)
