"""The KV cache of the fused decoders, and attention over it.

Shapes: R = rows, B = rows in use, N = prompts, P = tokens per padded prompt, T = all tokens of a
forward pass, M = pages of the KV cache, G = pages of a row, L = columns of a page, S = columns of a
row, Q = query heads, K = key/value heads, D = head size. A layer's KV cache ``kv_cache_2MKLD``
holds keys, then values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.base.decoder_modules import DecoderModules
from rlhf.base.types import copy_to_device
from rlhf.kernels import kernels_for
from rlhf.kernels.gpu.attention_gpu import CHUNK
from rlhf.rollout.decoders.decoder import Texts

SAMPLE_PAGES = 6  # of the KV cache on which the kernel is compared with torch


class Heads(NamedTuple):
    """Queries, keys and values of one layer."""

    query_TQD: Tensor
    key_TKD: Tensor
    value_TKD: Tensor


Attend = Callable[[Tensor, Heads], Tensor]  # stores heads in a KV cache; returns (T, Q, D)


class PagedAttention:
    """A KV cache for all layers, and a builder of the attention function of a forward pass.

    Column i of row r is column i % L of page ``pages_RG[r, i // L]``. With ``num_pages`` above 0,
    rows share so many pages of ``CHUNK`` columns, and one more that nobody reads, if the kernel can
    read them. Otherwise each row is a page: row r is page r, or with ``num_pages=0`` the page that
    the caller sets.
    """

    def __init__(
        self,
        parts: DecoderModules,
        *,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        num_pages: int | None,
    ) -> None:
        self._parts = parts
        self._dtype = dtype
        self._device = device = parts.tokens.weight.device
        of_page = (parts.num_kv_heads, CHUNK, parts.head_dim)
        sample = torch.zeros(2, SAMPLE_PAGES, *of_page, dtype=dtype, device=device)
        group = parts.num_heads // parts.num_kv_heads
        self._kernel = kernels_for(device.type).attention_kernel(sample, group)
        # True if a decode step reads the same columns of the KV cache in every row.
        self.reads_whole_columns = self._kernel is None
        self.columns = tokens
        self.has_shared_pages = num_pages is not None and num_pages > 0 and self._kernel is not None
        if num_pages is not None and self.has_shared_pages:
            self.page_columns, count = min(CHUNK, tokens), num_pages + 1
            self.pages_RG = torch.zeros(rows, -(-tokens // CHUNK), dtype=torch.long, device=device)
        else:
            self.page_columns, count = tokens, rows
            self.pages_RG = torch.arange(rows, device=device)[:, None]
        self._are_pages_fixed = num_pages is None
        shape = (len(parts.blocks), 2, count, of_page[0], self.page_columns, of_page[2])
        # Zeros, because masked columns are multiplied by 0, and 0 times NaN is NaN.
        self.kv_cache = torch.zeros(shape, dtype=dtype, device=device)

    def copy_page(self, source: int, target: int, *, columns: int) -> None:
        """Copy the first ``columns`` columns of page ``source`` to page ``target``."""
        self.kv_cache[:, :, target, :, :columns] = self.kv_cache[:, :, source, :, :columns]

    def build_text_attention(self, texts: Texts, first_row: int) -> Attend:
        """Build the attention function for texts in the rows from ``first_row`` on."""
        if texts.starts is not None:
            return self._build_added_attention(texts.ids_NP, texts.lengths, texts.starts, first_row)
        num_prompts, num_columns = texts.ids_NP.shape
        rows_N1 = torch.arange(num_prompts, device=self._device)[:, None] + first_row
        pages_NP, columns_P = self._locate(rows_N1, torch.arange(num_columns, device=self._device))

        def attend(kv_cache_2MKLD: Tensor, heads: Heads) -> Tensor:
            query, key, value = (x.view(num_prompts, num_columns, *x.shape[1:]) for x in heads)
            for numbers_MKLD, newest_NPKD in zip(kv_cache_2MKLD, (key, value), strict=True):
                numbers_MKLD[pages_NP, :, columns_P] = newest_NPKD
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            # With causal attention no token attends to the padding on its right.
            mixed_NQPD = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=self._is_grouped
            )
            return mixed_NQPD.transpose(1, 2).flatten(0, 1)

        return attend

    def _build_added_attention(
        self, ids_NP: Tensor, lengths: list[int], starts: list[int], first_row: int
    ) -> Attend:
        """Build the attention function for texts that follow the tokens in their rows."""
        num_texts, num_columns = ids_NP.shape
        longest = max(start + length for start, length in zip(starts, lengths, strict=True))
        device = self._device
        starts_N1, lengths_N1 = copy_to_device(torch.tensor([starts, lengths]), device)[..., None]
        places_NP = starts_N1 + torch.arange(num_columns, device=device)
        is_text_T = (places_NP < starts_N1 + lengths_N1).flatten()
        texts_T = torch.arange(num_texts, device=device).repeat_interleave(num_columns)[is_text_T]
        pages_T, columns_T = self._locate(first_row + texts_T, places_NP.flatten()[is_text_T])
        hidden_NPS = torch.arange(longest, device=device) > places_NP[..., None]
        mask_N1PS = self._build_additive_mask(hidden_NPS)[:, None]
        rows = slice(first_row, first_row + num_texts)

        def attend(kv_cache_2MKLD: Tensor, heads: Heads) -> Tensor:
            keys_MKLD, values_MKLD = kv_cache_2MKLD.unbind()
            keys_MKLD[pages_T, :, columns_T] = heads.key_TKD[is_text_T]
            values_MKLD[pages_T, :, columns_T] = heads.value_TKD[is_text_T]
            query_NPQD = heads.query_TQD.view(num_texts, num_columns, *heads.query_TQD.shape[1:])
            mixed_NQPD = functional.scaled_dot_product_attention(
                query_NPQD.transpose(1, 2),
                self._read_rows(keys_MKLD, rows, longest),
                self._read_rows(values_MKLD, rows, longest),
                attn_mask=mask_N1PS,
                enable_gqa=self._is_grouped,
            )
            return mixed_NQPD.transpose(1, 2).flatten(0, 1)

        return attend

    def build_decode_attention(self, positions_B: Tensor, columns: int) -> Attend:
        """Build the attention function for one new token in each of the first B rows.

        All positions are below ``columns``.
        """
        kernel, num_rows, parts = self._kernel, len(positions_B), self._parts
        if kernel is not None:
            pages_BG = self.pages_RG[:num_rows]
            return lambda kv_cache_2MKLD, heads: kernel(
                *heads, kv_cache_2MKLD, pages_BG, positions_B, columns
            )
        pages_B = self.pages_RG[:num_rows, 0]
        hidden_BS = torch.arange(columns, device=self._device) > positions_B[:, None]
        mask_B11S = self._build_additive_mask(hidden_BS)[:, None, None]
        grouped = (num_rows, parts.num_kv_heads, -1, parts.head_dim)
        rows = slice(0, num_rows)

        def attend(kv_cache_2MKLD: Tensor, heads: Heads) -> Tensor:
            keys_MKLD, values_MKLD = kv_cache_2MKLD.unbind()
            keys_MKLD[pages_B, :, positions_B] = heads.key_TKD
            values_MKLD[pages_B, :, positions_B] = heads.value_TKD
            # Fold grouped query heads into the sequence dimension so that K and V need no repeat.
            return functional.scaled_dot_product_attention(
                heads.query_TQD.reshape(grouped),
                self._read_rows(keys_MKLD, rows, columns),
                self._read_rows(values_MKLD, rows, columns),
                attn_mask=mask_B11S,
            ).reshape(num_rows, parts.num_heads, parts.head_dim)

        return attend

    @property
    def _is_grouped(self) -> bool:
        return self._parts.num_heads != self._parts.num_kv_heads

    def _locate(self, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the page, and the column in this page, of each place (column) of each row."""
        return self.pages_RG[rows, places // self.page_columns], places % self.page_columns

    def _read_rows(self, numbers_MKLD: Tensor, rows: slice, columns: int) -> Tensor:
        """Return the keys or values of the first columns of rows (N, K, S, D)."""
        if self._are_pages_fixed:  # row r is page r
            return numbers_MKLD[rows, :, :columns]
        pages_NG = self.pages_RG[rows, : -(-columns // self.page_columns)]
        return numbers_MKLD[pages_NG].transpose(1, 2).flatten(2, 3)[:, :, :columns]

    def _build_additive_mask(self, hidden: Tensor) -> Tensor:
        """Return a mask to add to attention scores: -inf where ``hidden`` is True, 0 elsewhere."""
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)


def join_attention(attend_newest: Attend, attend_prompts: Attend, num_rows: int) -> Attend:
    """Join functions: ``attend_newest`` gets the first ``num_rows`` tokens, the other the rest."""

    def attend(kv_cache_2MKLD: Tensor, heads: Heads) -> Tensor:
        newest_BQD = attend_newest(kv_cache_2MKLD, Heads(*(x[:num_rows] for x in heads)))
        prompts_TQD = attend_prompts(kv_cache_2MKLD, Heads(*(x[num_rows:] for x in heads)))
        return torch.cat([newest_BQD, prompts_TQD])

    return attend
