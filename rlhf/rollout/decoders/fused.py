"""Decoding in torch for the model families of families.yaml, with few operations per token.

Shapes: B = rows in use, N = prompts, P = tokens per padded prompt, T = all tokens of a forward
pass, D = head size, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.base.decoder_modules import BlockOrder, DecoderModules
from rlhf.base.types import copy_to_device
from rlhf.rollout.decoders.attention import Attend, Heads, PagedAttention, join_attention
from rlhf.rollout.decoders.decoder import KvCache, Texts
from rlhf.rollout.decoders.layers import AdapterOf, Layer, LayerBuilder, RotaryEmbedding

# Largest allowed difference of two computations of a log-probability, as a multiple of the standard
# deviation of the log-probabilities over the vocabulary at that position; wrong results reach 1.
TOLERANCES = {torch.float32: 0.02, torch.bfloat16: 0.1, torch.float16: 0.1}


class FusedDecoder(KvCache):
    """A ``PackingDecoder`` for models of the known families with one of ``ACTIVATIONS``.

    Only attention depends on a token's row; other layers treat a pass's tokens as one list. With
    ``num_pages`` the caller sets which pages of the KV cache rows use, as ``PagedAttention`` says.
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
        num_pages: int | None = None,
    ) -> None:
        builder = LayerBuilder(parts, adapter_of, dtype)
        self._parts = parts
        self._device: torch.device = parts.tokens.weight.device
        self._layers = [builder.build_layer(block) for block in parts.blocks]
        self._final = [builder.build_norm_or_projection(module) for module in parts.final]
        self._head = builder.build_output_layer()
        self._embed = builder.build_embedding()
        self._rotary = builder.build_rotary_embedding(tokens)
        self._casts = builder.casts
        self.attention = PagedAttention(
            parts, rows=rows, tokens=tokens, dtype=dtype, num_pages=num_pages
        )

    @property
    def last_position(self) -> int:
        """Return the largest position that a token may have."""
        columns, learned = self.attention.columns, self._parts.positions
        limit = columns if learned is None else len(learned.weight) - self._parts.position_offset
        return min(columns, limit) - 1

    def refresh_weight_copies(self) -> None:
        """Update the cast copies of weights; weights in the decoder's precision have no copies."""
        if self._casts:
            casts, weights = zip(*self._casts, strict=True)
            torch._foreach_copy_(casts, weights)

    def prefill(self, texts: Texts, *, first_row: int) -> Tensor:
        """Prefill texts into the rows from ``first_row`` on; return logits (N, V)."""
        attend = self.attention.build_text_attention(texts, first_row)
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
        attend = self.attention.build_decode_attention(positions_B, columns)
        return self._compute_logits(self._run_blocks(ids_B, positions_B, attend))

    def decode_and_prefill(self, ids_B: Tensor, positions: list[int], texts: Texts) -> Tensor:
        """Decode B rows and prefill the rows after them in one pass; return logits (B + N, V)."""
        num_rows = len(ids_B)
        positions_B = copy_to_device(torch.tensor(positions), self._device)
        positions_T = torch.cat([positions_B, self._text_positions(texts)])
        attend = join_attention(
            self.attention.build_decode_attention(positions_B, max(positions) + 1),
            self.attention.build_text_attention(texts, num_rows),
            num_rows,
        )
        x_TH = self._run_blocks(torch.cat([ids_B, texts.ids_NP.flatten()]), positions_T, attend)
        last_N = num_rows + self._last_token_indices(texts)
        return self._compute_logits(torch.cat([x_TH[:num_rows], x_TH[last_N]]))

    def copy_row(self, source: int, target: int, *, columns: int) -> None:
        """Copy the KV cache of ``columns`` tokens from row ``source`` to row ``target``."""
        self.attention.copy_page(source, target, columns=columns)

    def _text_positions(self, texts: Texts) -> Tensor:
        """Return the tokens' positions (N * P); padding is clamped to columns of the KV cache."""
        num_texts, num_columns = texts.ids_NP.shape
        columns_P = torch.arange(num_columns, device=self._device)
        if texts.starts is None:
            return columns_P.repeat(num_texts)
        starts_N1 = copy_to_device(torch.tensor(texts.starts), self._device)[:, None]
        return (starts_N1 + columns_P).clamp(max=self.attention.columns - 1).flatten()

    def _last_token_indices(self, texts: Texts) -> Tensor:
        """Return the indices (N) of the texts' last tokens among all N * P tokens."""
        num_columns = texts.ids_NP.shape[1]
        last = [row * num_columns + length - 1 for row, length in enumerate(texts.lengths)]
        return copy_to_device(torch.tensor(last), self._device)

    def _run_blocks(self, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Run all blocks on the tokens; return the hidden states (T, H)."""
        order, x = self._parts.order, self._embed(ids_T, positions_T)
        rotary = None if self._rotary is None else self._rotary.select_rows(positions_T[:, None])
        for layer, kv_cache in zip(self._layers, self.attention.kv_cache, strict=True):
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
