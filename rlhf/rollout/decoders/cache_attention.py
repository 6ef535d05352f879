"""Attention over the KV cache of ``FusedDecoder``, for new texts and for newest tokens.

Shapes: R = rows of the KV cache, B = rows in use, N = texts, P = tokens per padded text, T = all
tokens of a forward pass, L = columns of the KV cache, Q = query heads, K = key/value heads, D =
head size. A layer's KV cache ``kv_cache_2RKLD`` holds keys, then values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.base.decoder_modules import DecoderModules
from rlhf.base.host_copies import copy_to_device
from rlhf.kernels.attention_gpu import gpu_attention
from rlhf.rollout.decoders.decoder import Texts


class Heads(NamedTuple):
    """Queries, keys and values of one layer."""

    query_TQD: Tensor
    key_TKD: Tensor
    value_TKD: Tensor


Attend = Callable[[Tensor, Heads], Tensor]  # updates a layer's KV cache; returns (T, Q, D)


class CacheAttention:
    """A maker of attention functions, one for each forward pass, which all layers share."""

    def __init__(self, parts: DecoderModules, device: torch.device, dtype: torch.dtype) -> None:
        self._parts = parts
        self._device = device
        self._dtype = dtype
        group = parts.num_heads // parts.num_kv_heads
        self._kernel = gpu_attention(device, dtype, group=group, size=parts.head_dim)

    @property
    def reads_whole_columns(self) -> bool:
        """Return True if a decode step reads the same columns of the KV cache in every row."""
        return self._kernel is None

    def of_texts(self, texts: Texts, first_row: int) -> Attend:
        """Return the attention function for texts in the rows from ``first_row`` on."""
        if texts.starts is not None:
            return self._of_added_texts(texts.ids_NP, texts.lengths, texts.starts, first_row)
        num_prompts, num_columns = texts.ids_NP.shape
        rows = slice(first_row, first_row + num_prompts)

        def attend(kv_cache_2RKLD: Tensor, heads: Heads) -> Tensor:
            query, key, value = (
                x.view(num_prompts, num_columns, *x.shape[1:]).transpose(1, 2) for x in heads
            )
            kv_cache_2RKLD[0, rows, :, :num_columns] = key
            kv_cache_2RKLD[1, rows, :, :num_columns] = value
            # Causal, so that no token attends to the padding on its right.
            mixed_NQPD = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
            )
            return mixed_NQPD.transpose(1, 2).flatten(0, 1)

        return attend

    def _of_added_texts(
        self, ids_NP: Tensor, lengths: list[int], starts: list[int], first_row: int
    ) -> Attend:
        """Return the attention function for texts that follow what their rows hold."""
        num_texts, num_columns = ids_NP.shape
        parts, device = self._parts, self._device
        longest = max(start + length for start, length in zip(starts, lengths, strict=True))
        starts_N1, lengths_N1 = copy_to_device(torch.tensor([starts, lengths]), device)[..., None]
        places_NP = starts_N1 + torch.arange(num_columns, device=device)
        is_text_T = (places_NP < starts_N1 + lengths_N1).flatten()
        texts_T = torch.arange(num_texts, device=device).repeat_interleave(num_columns)[is_text_T]
        rows_T, places_T = first_row + texts_T, places_NP.flatten()[is_text_T]
        hidden_NPL = torch.arange(longest, device=device) > places_NP[..., None]
        mask_N1PL = self._added_mask(hidden_NPL)[:, None]
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

    def of_newest(self, positions_B: Tensor, columns: int) -> Attend:
        """Return the attention function for one new token in each of the first B rows."""
        kernel, num_rows, parts = self._kernel, len(positions_B), self._parts
        if kernel is not None:
            return lambda kv_cache_2RKLD, heads: kernel(*heads, kv_cache_2RKLD, positions_B)
        rows_B = torch.arange(num_rows, device=self._device)
        hidden_BL = torch.arange(columns, device=self._device) > positions_B[:, None]
        mask_B11L = self._added_mask(hidden_BL)[:, None, None]
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

    def _added_mask(self, hidden: Tensor) -> Tensor:
        """Return a mask of the same shape that is added to attention scores."""
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)


def attend_both(attend_newest: Attend, attend_prompts: Attend, num_rows: int) -> Attend:
    """Return a function that decodes the first ``num_rows`` tokens and prefills the others."""

    def attend(kv_cache_2RKLD: Tensor, heads: Heads) -> Tensor:
        newest_BQD = attend_newest(kv_cache_2RKLD, Heads(*(x[:num_rows] for x in heads)))
        prompts_TQD = attend_prompts(kv_cache_2RKLD, Heads(*(x[num_rows:] for x in heads)))
        return torch.cat([newest_BQD, prompts_TQD])

    return attend
