"""Decoding for every decoder-only model of transformers, through its cache interface.

Shapes: B = rows of a call, P = prompt tokens, S = tokens per row of a call, V = vocabulary; in the
KV cache R = rows, N = heads, C = columns, D = head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf.base.decoder_modules import kv_cache_parameter_name
from rlhf.base.errors import CapabilityError
from rlhf.rollout.decoders.decoder import KvCache, Texts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# ALiBi models (https://arxiv.org/abs/2108.12409), which need no positions.
# Their attention biases depend on the columns of the keys.
WITHOUT_POSITIONS = {"bloom", "mpt"}


class CacheDecoder(KvCache):
    """A ``Decoder`` for any causal language model, run by its own ``forward``.

    A row's token at position p is stored in column p of the KV cache, so a row attends to the
    columns up to its own position. The first call allocates keys and values for rows x tokens in
    every layer.
    """

    rows_are_exact = False
    extends_together = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int,
        tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        obstacle = decoding_unsupported_reason(type(model), model.config, tokens=tokens)
        if obstacle is not None:
            raise CapabilityError(
                f"rollout.backend=fast: a model of model_type={model.config.model_type} "
                f"{obstacle}; use rollout=hf"
            )
        self._model = model
        self._kv_cache = RowCache(rows, tokens, device=device, dtype=dtype)
        self._columns_C = torch.arange(tokens, device=device)
        parameters = _parameter_names(model.forward)
        self._takes_positions = "position_ids" in parameters
        self._cache_argument = str(kv_cache_parameter_name(parameters))

    def prefill(self, texts: Texts, *, first_row: int) -> Tensor:
        """Prefill texts into the rows from ``first_row`` on; return logits (B, V).

        All rows must hold equally many tokens already: a forward pass takes only one past length.
        """
        ids_BP, lengths, starts = texts
        longest, start = max(lengths), max(starts or [0])
        assert starts is None or min(starts) == start, "rows of different starts in one pass"
        self._kv_cache.prepare_for_texts(first_row=first_row, start=start)
        with _restrict_output_layer(self._model, [length - 1 for length in lengths]):
            columns_P = self._columns_C[start : start + longest]
            positions_BP = columns_P[None].expand(len(lengths), -1)
            ends = [start + length for length in lengths]
            return self._last_token_logits(ids_BP[:, :longest], positions_BP, ends)

    def decode(self, ids_B: Tensor, positions: list[int]) -> Tensor:
        """Decode one token for each of the first B rows, at its position; return logits (B, V)."""
        positions_B = torch.tensor(positions, device=ids_B.device)
        self._kv_cache.prepare_for_tokens(positions, positions_B)
        lengths = [position + 1 for position in positions]
        return self._last_token_logits(ids_B[:, None], positions_B[:, None], lengths)

    def copy_row(self, source: int, target: int, *, columns: int) -> None:
        """Copy the KV cache of ``columns`` tokens from row ``source`` to row ``target``."""
        self._kv_cache.copy_row(source, target, columns)

    def _last_token_logits(
        self, ids_BS: Tensor, positions_BS: Tensor, lengths: list[int]
    ) -> Tensor:
        """Return logits (B, V) of one token per row, to which the output layer is restricted."""
        longest = max(lengths)
        attend_BC = None
        if min(lengths) < longest:
            lengths_B1 = torch.tensor(lengths, device=ids_BS.device)[:, None]
            attend_BC = (self._columns_C[:longest] < lengths_B1).long()
        positions = {"position_ids": positions_BS} if self._takes_positions else {}
        output = self._model(
            input_ids=ids_BS,
            attention_mask=attend_BC,
            use_cache=True,
            **positions,
            **{self._cache_argument: self._kv_cache},
        )
        logits_BV: Tensor = output.logits.squeeze(1)
        return logits_BV


class RowCache:
    """A KV cache whose rows grow independently; a model uses it as a transformers ``Cache``.

    It has the methods of ``Cache`` that models call, and reports the length of the longest row; the
    attention mask marks the columns that each row uses.
    """

    is_compileable = False

    def __init__(self, rows: int, tokens: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._rows, self._tokens = rows, tokens
        self._device, self._dtype = device, dtype
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._row_numbers_B = torch.arange(rows, device=device)
        self._first_row, self._past = 0, 0
        self._positions_B: Tensor | None = None

    def prepare_for_texts(self, *, first_row: int, start: int) -> None:
        """Set the first row and the first column of the texts in the next forward pass."""
        self._first_row, self._past, self._positions_B = first_row, start, None

    def prepare_for_tokens(self, positions: list[int], positions_B: Tensor) -> None:
        """Set the KV cache columns of the next pass: it has one token in each of the first rows."""
        self._past, self._positions_B = max(positions), positions_B

    def copy_row(self, source: int, target: int, columns: int) -> None:
        """Copy keys and values of ``columns`` tokens from row ``source`` to row ``target``."""
        for layer in self._layers.values():
            for kv_cache_RNCD in layer:
                kv_cache_RNCD[target, :, :columns] = kv_cache_RNCD[source, :, :columns]

    def update(
        self, keys_BNSD: Tensor, values_BNSD: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return all keys and values of the call's rows."""
        if layer_idx not in self._layers:
            like = self._allocate_like
            self._layers[layer_idx] = like(keys_BNSD), like(values_BNSD)
        keys_RNCD, values_RNCD = self._layers[layer_idx]
        store = self._store_tokens
        return store(keys_RNCD, keys_BNSD), store(values_RNCD, values_BNSD)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Return the number of columns before those of the current call's tokens."""
        return self._past

    get_query_offset = get_seq_length  # column of the call's first token, for causal masks

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        """Return the number of columns of the attention mask, and its first column."""
        return self._past + query_length, 0

    def get_max_length(self, *_: Any, **__: Any) -> int:
        """Return the number of columns of the cache."""
        return self._tokens

    def _allocate_like(self, like_BNSD: Tensor) -> Tensor:
        # Zeros, because masked columns are multiplied by 0, and 0 times NaN is NaN.
        shape = (self._rows, like_BNSD.shape[1], self._tokens, like_BNSD.shape[3])
        return torch.zeros(shape, device=self._device, dtype=self._dtype)

    def _store_tokens(self, kv_cache_RNCD: Tensor, new_BNSD: Tensor) -> Tensor:
        num_rows, _, num_tokens, _ = new_BNSD.shape
        if self._positions_B is None:
            rows, end = slice(self._first_row, self._first_row + num_rows), self._past + num_tokens
            kv_cache_RNCD[rows, :, self._past : end] = new_BNSD
            return kv_cache_RNCD[rows, :, :end].to(new_BNSD.dtype) if self._past else new_BNSD
        rows_B = self._row_numbers_B[:num_rows]
        kv_cache_RNCD[rows_B, :, self._positions_B] = new_BNSD[:, :, 0].to(self._dtype)
        return kv_cache_RNCD[:num_rows, :, : self._past + 1].to(new_BNSD.dtype)


@contextmanager
def _restrict_output_layer(model: PreTrainedModel, last: list[int]) -> Iterator[None]:
    """Restrict the output layer to position last[i] of row i, since the vocabulary is large."""

    def select_last_positions(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_BSH, *others = args
        rows_B = torch.arange(len(last), device=hidden_BSH.device)
        last_B = torch.tensor(last, device=hidden_BSH.device)
        return hidden_BSH[rows_B, last_B][:, None], *others

    handle = model.get_output_embeddings().register_forward_pre_hook(select_last_positions)
    try:
        yield
    finally:
        handle.remove()


def _parameter_names(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def decoding_unsupported_reason(
    model: type[PreTrainedModel], config: PreTrainedConfig, *, tokens: int
) -> str | None:
    """Return why a ``RowCache`` with rows of ``tokens`` tokens cannot serve ``model``, or None."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    parameters = _parameter_names(model.forward)
    if config.is_encoder_decoder:
        return "has an encoder"
    if model._is_stateful or kv_cache_parameter_name(parameters) is None:
        return "does not cache the keys and values of its tokens"
    layers = DynamicCache(config=config).layers
    if not all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        return "has layers that do not cache the keys and values of all tokens"
    if "position_ids" not in parameters and config.model_type not in WITHOUT_POSITIONS:
        return "has no position_ids argument for the positions of its tokens"
    windows = [layer.sliding_window for layer in layers if layer.is_sliding]
    if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo
        windows.append(config.window_size)
    if windows and min(windows) < tokens:
        return (
            f"attends to {min(windows)} tokens at most, fewer than the {tokens} of "
            "rollout.max_prompt_tokens and rollout.max_response_tokens together"
        )
    return None
