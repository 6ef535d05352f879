"""Decoding in torch for the model families of families.yaml, with few operations per token.

Shapes: R = rows of the KV cache, B = rows in use, N = prompts, P = tokens per padded prompt, T =
all tokens of a forward pass, L = columns of the KV cache, Q = query heads, K = key/value heads, D =
head size, H = hidden size, V = vocabulary. A layer's KV cache ``kv_cache_2RKLD`` holds keys, then
values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.base.decoder_modules import BlockOrder, DecoderModules
from rlhf.base.types import copy_to_device
from rlhf.kernels import kernels_for
from rlhf.rollout.decoders.decoder import KvCache, Texts
from rlhf.rollout.decoders.layers import AdapterOf, Layer, LayerBuilder, RotaryEmbedding

# Largest allowed difference of two computations of a log-probability, as a multiple of the standard
# deviation of the log-probabilities over the vocabulary at that position; wrong results reach 1.
TOLERANCES = {torch.float32: 0.02, torch.bfloat16: 0.1, torch.float16: 0.1}


class Heads(NamedTuple):
    """Queries, keys and values of one layer."""

    query_TQD: Tensor
    key_TKD: Tensor
    value_TKD: Tensor


Attend = Callable[[Tensor, Heads], Tensor]  # stores heads in a KV cache; returns (T, Q, D)


class CacheAttention:
    """A builder of attention functions, one per forward pass, which all layers share."""

    def __init__(self, parts: DecoderModules, kv_cache_2RKLD: Tensor) -> None:
        self._parts = parts
        self._device = kv_cache_2RKLD.device
        self._dtype = kv_cache_2RKLD.dtype
        group = parts.num_heads // parts.num_kv_heads
        self._kernel = kernels_for(self._device.type).attention_kernel(kv_cache_2RKLD, group)
        # True if a decode step reads the same columns of the KV cache in every row.
        self.reads_whole_columns = self._kernel is None

    def build_text_attention(self, texts: Texts, first_row: int) -> Attend:
        """Build the attention function for texts in the rows from ``first_row`` on."""
        if texts.starts is not None:
            return self._build_added_attention(texts.ids_NP, texts.lengths, texts.starts, first_row)
        num_prompts, num_columns = texts.ids_NP.shape
        rows = slice(first_row, first_row + num_prompts)

        def attend(kv_cache_2RKLD: Tensor, heads: Heads) -> Tensor:
            query, key, value = (
                x.view(num_prompts, num_columns, *x.shape[1:]).transpose(1, 2) for x in heads
            )
            kv_cache_2RKLD[0, rows, :, :num_columns] = key
            kv_cache_2RKLD[1, rows, :, :num_columns] = value
            # With causal attention no token attends to the padding on its right.
            mixed_NQPD = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
            )
            return mixed_NQPD.transpose(1, 2).flatten(0, 1)

        return attend

    def _build_added_attention(
        self, ids_NP: Tensor, lengths: list[int], starts: list[int], first_row: int
    ) -> Attend:
        """Build the attention function for texts that follow the tokens in their rows."""
        num_texts, num_columns = ids_NP.shape
        parts, device = self._parts, self._device
        longest = max(start + length for start, length in zip(starts, lengths, strict=True))
        starts_N1, lengths_N1 = copy_to_device(torch.tensor([starts, lengths]), device)[..., None]
        places_NP = starts_N1 + torch.arange(num_columns, device=device)
        is_text_T = (places_NP < starts_N1 + lengths_N1).flatten()
        texts_T = torch.arange(num_texts, device=device).repeat_interleave(num_columns)[is_text_T]
        rows_T, places_T = first_row + texts_T, places_NP.flatten()[is_text_T]
        hidden_NPL = torch.arange(longest, device=device) > places_NP[..., None]
        mask_N1PL = self._build_additive_mask(hidden_NPL)[:, None]
        rows = slice(first_row, first_row + num_texts)

        def attend(kv_cache_2RKLD: Tensor, heads: Heads) -> Tensor:
            keys_RKLD, values_RKLD = kv_cache_2RKLD.unbind()
            keys_RKLD[rows_T, :, places_T] = heads.key_TKD[is_text_T]
            values_RKLD[rows_T, :, places_T] = heads.value_TKD[is_text_T]
            query_NPQD = heads.query_TQD.view(num_texts, num_columns, -1, parts.head_dim)
            mixed_NQPD = functional.scaled_dot_product_attention(
                query_NPQD.transpose(1, 2),
                keys_RKLD[rows, :, :longest],
                values_RKLD[rows, :, :longest],
                attn_mask=mask_N1PL,
                enable_gqa=parts.num_heads != parts.num_kv_heads,
            )
            return mixed_NQPD.transpose(1, 2).flatten(0, 1)

        return attend

    def build_decode_attention(self, positions_B: Tensor, columns: int) -> Attend:
        """Build the attention function for one new token in each of the first B rows."""
        kernel, num_rows, parts = self._kernel, len(positions_B), self._parts
        if kernel is not None:
            return lambda kv_cache_2RKLD, heads: kernel(
                *heads, kv_cache_2RKLD[:, :, :, :columns], positions_B
            )
        rows_B = torch.arange(num_rows, device=self._device)
        hidden_BL = torch.arange(columns, device=self._device) > positions_B[:, None]
        mask_B11L = self._build_additive_mask(hidden_BL)[:, None, None]
        grouped = (num_rows, parts.num_kv_heads, -1, parts.head_dim)

        def attend(kv_cache_2RKLD: Tensor, heads: Heads) -> Tensor:
            keys_RKLD, values_RKLD = kv_cache_2RKLD.unbind()
            keys_RKLD[rows_B, :, positions_B] = heads.key_TKD
            values_RKLD[rows_B, :, positions_B] = heads.value_TKD
            # Fold grouped query heads into the sequence dimension so that K and V need no repeat.
            return functional.scaled_dot_product_attention(
                heads.query_TQD.reshape(grouped),
                keys_RKLD[:num_rows, :, :columns],
                values_RKLD[:num_rows, :, :columns],
                attn_mask=mask_B11L,
            ).reshape(num_rows, parts.num_heads, parts.head_dim)

        return attend

    def _build_additive_mask(self, hidden: Tensor) -> Tensor:
        """Return a mask to add to attention scores: -inf where ``hidden`` is True, 0 elsewhere."""
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)


def join_attention(attend_newest: Attend, attend_prompts: Attend, num_rows: int) -> Attend:
    """Join functions: ``attend_newest`` gets the first ``num_rows`` tokens, the other the rest."""

    def attend(kv_cache_2RKLD: Tensor, heads: Heads) -> Tensor:
        newest_BQD = attend_newest(kv_cache_2RKLD, Heads(*(x[:num_rows] for x in heads)))
        prompts_TQD = attend_prompts(kv_cache_2RKLD, Heads(*(x[num_rows:] for x in heads)))
        return torch.cat([newest_BQD, prompts_TQD])

    return attend


class FusedDecoder(KvCache):
    """A ``PackingDecoder`` for models of the known families with one of ``ACTIVATIONS``.

    Only attention depends on a token's row; other layers treat a pass's tokens as one list.
    """

    rows_are_exact = False  # with more rows, a matrix product may sum in another order
    extends_together = True

    def __init__(
        self,
        parts: DecoderModules,
        adapter_of: AdapterOf,
        *,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
    ) -> None:
        builder = LayerBuilder(parts, adapter_of, dtype)
        self._parts = parts
        self._dtype = dtype
        self._device: torch.device = parts.tokens.weight.device
        self._layers = [builder.build_layer(block) for block in parts.blocks]
        self._final = [builder.build_norm_or_projection(module) for module in parts.final]
        self._head = builder.build_output_layer()
        self._embed = builder.build_embedding()
        self._rotary = builder.build_rotary_embedding(tokens)
        self._casts = builder.casts
        shape = (len(self._layers), 2, rows, parts.num_kv_heads, tokens, parts.head_dim)
        # Zeros, because masked columns are multiplied by 0, and 0 times NaN is NaN.
        self._kv_cache = torch.zeros(shape, dtype=dtype, device=self._device)
        self._attention = CacheAttention(parts, self._kv_cache[0])
        self.reads_whole_columns = self._attention.reads_whole_columns

    @property
    def last_position(self) -> int:
        """Return the largest position that a token may have."""
        columns, learned = self._kv_cache.shape[-2], self._parts.positions
        limit = columns if learned is None else len(learned.weight) - self._parts.position_offset
        return min(columns, limit) - 1

    def refresh_weight_copies(self) -> None:
        """Update the cast copies of weights; weights in the decoder's precision have no copies."""
        if self._casts:
            casts, weights = zip(*self._casts, strict=True)
            torch._foreach_copy_(casts, weights)

    def prefill(self, texts: Texts, *, first_row: int) -> Tensor:
        """Prefill texts into the rows from ``first_row`` on; return logits (N, V)."""
        attend = self._attention.build_text_attention(texts, first_row)
        x_TH = self._run_blocks(texts.ids_NP.flatten(), self._text_positions(texts), attend)
        return self._compute_logits(x_TH[self._last_token_indices(texts)])

    def decode(self, ids_B: Tensor, positions: list[int]) -> Tensor:
        """Decode one token for each of the first B rows, at its position; return logits (B, V)."""
        positions_B = copy_to_device(torch.tensor(positions), self._device)
        return self.decode_on_device(ids_B, positions_B, columns=max(positions) + 1)

    def decode_on_device(self, ids_B: Tensor, positions_B: Tensor, *, columns: int) -> Tensor:
        """Decode like ``decode``, with positions on the device, all below ``columns``.

        The host never waits for the value of a tensor, so a CUDA graph can capture this.
        """
        attend = self._attention.build_decode_attention(positions_B, columns)
        return self._compute_logits(self._run_blocks(ids_B, positions_B, attend))

    def decode_and_prefill(self, ids_B: Tensor, positions: list[int], texts: Texts) -> Tensor:
        """Decode B rows and prefill the rows after them in one pass; return logits (B + N, V)."""
        num_rows = len(ids_B)
        positions_B = copy_to_device(torch.tensor(positions), self._device)
        positions_T = torch.cat([positions_B, self._text_positions(texts)])
        attend = join_attention(
            self._attention.build_decode_attention(positions_B, max(positions) + 1),
            self._attention.build_text_attention(texts, num_rows),
            num_rows,
        )
        x_TH = self._run_blocks(torch.cat([ids_B, texts.ids_NP.flatten()]), positions_T, attend)
        last_N = num_rows + self._last_token_indices(texts)
        return self._compute_logits(torch.cat([x_TH[:num_rows], x_TH[last_N]]))

    def copy_row(self, source: int, target: int, *, columns: int) -> None:
        """Copy the KV cache of ``columns`` tokens from row ``source`` to row ``target``."""
        self._kv_cache[:, :, target, :, :columns] = self._kv_cache[:, :, source, :, :columns]

    def _text_positions(self, texts: Texts) -> Tensor:
        """Return the tokens' positions (N * P); padding is clamped to columns of the KV cache."""
        num_texts, num_columns = texts.ids_NP.shape
        columns_P = torch.arange(num_columns, device=self._device)
        if texts.starts is None:
            return columns_P.repeat(num_texts)
        starts_N1 = copy_to_device(torch.tensor(texts.starts), self._device)[:, None]
        return (starts_N1 + columns_P).clamp(max=self._kv_cache.shape[-2] - 1).flatten()

    def _last_token_indices(self, texts: Texts) -> Tensor:
        """Return the indices (N) of the texts' last tokens among all N * P tokens."""
        num_columns = texts.ids_NP.shape[1]
        last = [row * num_columns + length - 1 for row, length in enumerate(texts.lengths)]
        return copy_to_device(torch.tensor(last), self._device)

    def _run_blocks(self, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Run all blocks on the tokens; return the hidden states (T, H)."""
        order, x = self._parts.order, self._embed(ids_T, positions_T)
        rotary = None if self._rotary is None else self._rotary.select_rows(positions_T[:, None])
        for layer, kv_cache in zip(self._layers, self._kv_cache, strict=True):
            normed = x if order is BlockOrder.norm_last else layer.attention_norm(x)
            heads = self._compute_heads(layer, normed, rotary)
            attended = layer.output.project_and_add(attend(kv_cache, heads).flatten(1), x)
            if order is BlockOrder.norm_last:
                x = layer.attention_norm(attended)
                x = layer.mlp_norm(layer.down.project_and_add(layer.widen(x), x))
            else:
                inner = x if order is BlockOrder.parallel else attended
                x = layer.down.project_and_add(layer.widen(layer.mlp_norm(inner)), attended)
        return x

    def _compute_heads(self, layer: Layer, x_TH: Tensor, rotary: RotaryEmbedding | None) -> Heads:
        query, key, value = self._split_heads(
            layer, [project(x_TH) for project in layer.query_key_value]
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query), layer.key_norm(key)
        if rotary is not None:
            query, key = rotary(query), rotary(key)
        return Heads(query, key, value)

    def _split_heads(self, layer: Layer, projected: list[Tensor]) -> tuple[Tensor, ...]:
        """Split one projection, or three, into queries, keys and values (T, heads, D)."""
        parts, num_tokens = self._parts, len(projected[0])
        if len(parts.blocks[0].query_key_value) == 1:
            return projected[0].view(num_tokens, parts.num_heads, -1).chunk(3, dim=-1)
        counts = (parts.num_heads, parts.num_kv_heads, parts.num_kv_heads)
        if len(projected) == 1:
            together = projected[0].view(num_tokens, sum(counts), parts.head_dim)
            split = torch.split(together, [counts[index] for index in layer.joint_order], dim=1)
            return tuple(split[layer.joint_order.index(index)] for index in range(3))
        shapes = ((num_tokens, count, parts.head_dim) for count in counts)
        return tuple(x.view(shape) for x, shape in zip(projected, shapes, strict=True))

    def _compute_logits(self, x_BH: Tensor) -> Tensor:
        for step in self._final:
            x_BH = step(x_BH)
        return self._head(x_BH)
