"""Decoding for the known model families on a CPU: each forward pass is one call of compiled code.

Shapes: R = rows of the KV cache, B = rows in use, N = prompts, P = tokens per padded prompt, T =
all tokens of a forward pass, L = columns of the KV cache, K = key/value heads, D = head size, H =
hidden size, V = vocabulary.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rlhf.base.decoder_modules import BlockModules, BlockOrder, DecoderModules
from rlhf.kernels.cpu.decode import Combine, DecodeProgram, HeadsAt, load_decode_library
from rlhf.kernels.kernel_checks import Pairs, use_if_equal
from rlhf.rollout.decoders.decoder import KvCache, Texts
from rlhf.rollout.decoders.fused import TOLERANCES, FusedDecoder
from rlhf.rollout.decoders.layers import AdapterOf, LayerBuilder
from rlhf.rollout.decoders.projections import ACTIVATIONS


def can_compile(parts: DecoderModules, dtype: torch.dtype) -> bool:
    """Return True if ``CompiledDecoder`` can run ``parts`` on this machine."""
    block = parts.blocks[0]
    layers = (block.query_key_value[0], block.output, block.up, block.down)
    return (
        parts.tokens.weight.device.type == "cpu"
        and load_decode_library(dtype) is not None
        and all(layer.in_features % 2 == 0 for layer in layers)  # kernels read bf16 inputs in pairs
    )


def build_compiled_decoder(
    parts: DecoderModules, adapter_of: AdapterOf, *, rows: int, tokens: int, dtype: torch.dtype
) -> CompiledDecoder | None:
    """Return a decoder for ``rows`` sequences of ``tokens`` tokens; None if torch must decode."""

    def load() -> CompiledDecoder | None:
        if not can_compile(parts, dtype):
            return None
        return CompiledDecoder(parts, adapter_of, rows=rows, tokens=tokens, dtype=dtype)

    compare = partial(_compare_with_fused, parts, adapter_of, rows=rows, tokens=tokens, dtype=dtype)
    return use_if_equal("decoder", "cpu", load, compare, bound=TOLERANCES[dtype])


def _compare_with_fused(
    parts: DecoderModules,
    adapter_of: AdapterOf,
    decoder: CompiledDecoder,
    *,
    rows: int,
    tokens: int,
    dtype: torch.dtype,
) -> Pairs:
    """Compare the logits of two random prompts, and of two tokens after each of them."""
    num_rows = min(rows, 2)
    plain = FusedDecoder(parts, adapter_of, rows=num_rows, tokens=tokens, dtype=dtype)
    lengths = [max(1, min(tokens - 2, 16) // (row + 1)) for row in range(num_rows)]
    ids = torch.randint(len(parts.tokens.weight), (num_rows, max(lengths) + 2))
    texts = Texts(ids[:, :-2], lengths)
    yield decoder.prefill(texts, first_row=0), plain.prefill(texts, first_row=0)
    for step in range(tokens - max(lengths))[:2]:
        at = [length + step for length in lengths]
        yield decoder.decode(ids[:, step], at), plain.decode(ids[:, step], at)


class CompiledDecoder(KvCache):
    """A ``PackingDecoder`` for models of the known families on a CPU.

    A forward pass gets one list of tokens without padding, with each token's row and position. A
    table has the place of each row in the KV cache, so that moving a row copies nothing.
    """

    rows_are_exact = True  # a token's sums have the same order whatever else is in the pass
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
        library = load_decode_library(dtype)
        shape = (len(parts.blocks), 2, rows, parts.num_kv_heads, tokens, parts.head_dim)
        self._kv_cache = torch.zeros(shape, dtype=dtype)
        self._places_R = torch.arange(rows)  # the place of each row in the KV cache
        self._embed = builder.build_embedding()
        self._blocks = _Blocks(parts, builder, DecodeProgram(library, dtype), tokens=tokens)
        for block, kv_cache_2RKLD in zip(parts.blocks, self._kv_cache, strict=True):
            self._blocks.add_block(block, kv_cache_2RKLD)
        self._head = DecodeProgram(library, dtype)
        self._vocabulary = len(parts.head.weight)
        self._logits_dtype = builder.logits_dtype
        self._logits = _add_output_layers(self._head, parts, builder, self._logits_dtype)

    def prefill(self, texts: Texts, *, first_row: int) -> Tensor:
        """Prefill texts into rows from ``first_row`` on; return the last tokens' logits (N, V)."""
        state_TH = self._run_blocks(*_list_text_tokens(texts, first_row))
        return self._run_output_layers(state_TH[_last_token_indices(texts.lengths)])

    def decode(self, ids_B: Tensor, positions: list[int]) -> Tensor:
        """Decode one token for each of the first B rows, at its position; return logits (B, V)."""
        return self._run_output_layers(self._run_blocks(*_list_newest_tokens(ids_B, positions)))

    def decode_and_prefill(self, ids_B: Tensor, positions: list[int], texts: Texts) -> Tensor:
        """Decode B rows and prefill the rows after them in one pass; return logits (B + N, V)."""
        newest, num_rows = _list_newest_tokens(ids_B, positions), len(ids_B)
        added = _list_text_tokens(texts, num_rows)
        state_TH = self._run_blocks(*(torch.cat(both) for both in zip(newest, added, strict=True)))
        last = torch.cat([torch.arange(num_rows), num_rows + _last_token_indices(texts.lengths)])
        return self._run_output_layers(state_TH[last])

    def copy_row(self, source: int, target: int, *, columns: int) -> None:
        """Copy the KV cache of ``columns`` tokens from row ``source`` to row ``target``."""
        source, target = self._places_R[[source, target]].tolist()
        self._kv_cache[:, :, target, :, :columns] = self._kv_cache[:, :, source, :, :columns]

    def move_row(self, source: int, target: int, *, columns: int) -> None:  # noqa: ARG002
        """Move row ``source`` to ``target`` by exchanging the places of both in the KV cache."""
        self._places_R[[source, target]] = self._places_R[[target, source]]

    def _run_blocks(self, ids_T: Tensor, rows_T: Tensor, positions_T: Tensor) -> Tensor:
        """Run embedding and blocks on T tokens; return the hidden state (T, H)."""
        state_TH = self._embed(ids_T, positions_T)
        places_T = self._places_R[rows_T]
        self._blocks.program.run({_Blocks.STATE: state_TH}, places_T, positions_T)
        return state_TH

    def _run_output_layers(self, state_BH: Tensor) -> Tensor:
        """Run the layers after the blocks on hidden states (B, H); return the logits (B, V)."""
        logits_BV = state_BH.new_empty(len(state_BH), self._vocabulary, dtype=self._logits_dtype)
        rows_B = torch.arange(len(state_BH))
        self._head.run({_Blocks.STATE: state_BH, self._logits: logits_BV}, rows_B, rows_B)
        return logits_BV


class _Blocks:
    """A builder of the program that runs all blocks; buffer 0 holds the residual stream."""

    STATE = 0

    def __init__(
        self, parts: DecoderModules, builder: LayerBuilder, program: DecodeProgram, *, tokens: int
    ) -> None:
        self.program = program
        self._parts = parts
        self._builder = builder
        self._rotary = builder.build_rotary_embedding(tokens)
        self._activation = ACTIVATIONS[parts.activation].compiled
        sizes = {name: len(getattr(parts.blocks[0], name).weight) for name in ("output", "up")}
        heads = parts.num_heads + 2 * parts.num_kv_heads
        state = program.add_buffer(sizes["output"])
        assert state == self.STATE
        self._normed = program.add_buffer(sizes["output"])
        self._normed_for_mlp = program.add_buffer(sizes["output"])
        self._joined = program.add_buffer(heads * parts.head_dim)
        self._mixed = program.add_buffer(parts.num_heads * parts.head_dim)
        self._inner = program.add_buffer(sizes["up"])
        self._gate = program.add_buffer(sizes["up"])

    def add_block(self, block: BlockModules, kv_cache_2RKLD: Tensor) -> None:
        """Add the steps of one block to the program; its KV cache is ``kv_cache_2RKLD``."""
        order, state, normed = self._parts.order, self.STATE, self._normed
        if order is BlockOrder.norm_last:
            self._add_attention(block, kv_cache_2RKLD, x=state)
            self._add_norm(block.attention_norm, x=state, y=state)
            self._add_mlp(block, x=state)
            self._add_norm(block.mlp_norm, x=state, y=state)
            return
        self._add_norm(block.attention_norm, x=state, y=normed)
        if order is BlockOrder.parallel:  # attention and the MLP read the same residual stream
            self._add_norm(block.mlp_norm, x=state, y=self._normed_for_mlp)
            self._add_attention(block, kv_cache_2RKLD, x=normed)
            self._add_mlp(block, x=self._normed_for_mlp)
            return
        self._add_attention(block, kv_cache_2RKLD, x=normed)
        self._add_norm(block.mlp_norm, x=state, y=normed)
        self._add_mlp(block, x=normed)

    def _add_norm(self, module: Any, *, x: int, y: int) -> None:
        self.program.add_norm(self._builder.norm_parameters(module), x=x, y=y)

    def _add_attention(self, block: BlockModules, kv_cache_2RKLD: Tensor, *, x: int) -> None:
        """Add the steps for residual stream += attention(x) to the program."""
        heads = self._locate_heads(interleaved=len(block.query_key_value) == 1)
        joined = self._builder.join_linear_layers(*block.query_key_value)
        self.program.add_linear(joined, x=x, y=self._joined)
        for each, module in zip(heads, (block.query_norm, block.key_norm), strict=False):
            norm = None if module is None else self._builder.norm_parameters(module)
            if norm is not None or self._rotary is not None:
                self.program.add_rotary(each, norm, self._rotary)
        self.program.add_attention(heads, kv_cache_2RKLD, mixed=self._mixed)
        self._add_linear_to_state(block.output, x=self._mixed)

    def _add_mlp(self, block: BlockModules, *, x: int) -> None:
        """Add the steps for residual stream += mlp(x) to the program."""
        up = self._builder.join_linear_layers(block.up)
        if block.gate is None:
            self.program.add_linear(up, x=x, y=self._inner, activation=self._activation)
        else:
            gate = self._builder.join_linear_layers(block.gate)
            self.program.add_linear(gate, x=x, y=self._gate, activation=self._activation)
            self.program.add_linear(up, x=x, y=self._inner, combine=Combine.times, other=self._gate)
        self._add_linear_to_state(block.down, x=self._inner)

    def _add_linear_to_state(self, module: Any, *, x: int) -> None:
        layer = self._builder.join_linear_layers(module)
        self.program.add_linear(layer, x=x, y=self.STATE, combine=Combine.plus, other=self.STATE)

    def _locate_heads(self, *, interleaved: bool) -> tuple[HeadsAt, HeadsAt, HeadsAt]:
        """Return where queries, keys and values are in the output of the joined linear layer."""
        parts, size = self._parts, self._parts.head_dim
        counts = (parts.num_heads, parts.num_kv_heads, parts.num_kv_heads)
        width = sum(counts) * size
        starts = (0, counts[0] * size, (counts[0] + counts[1]) * size)
        if interleaved:  # q, k and v of the first head, then q, k and v of the second, ...
            starts = (0, size, 2 * size)
        head = 3 * size if interleaved else size
        query, key, value = (
            HeadsAt(self._joined, start, width, head, count)
            for start, count in zip(starts, counts, strict=True)
        )
        return query, key, value


def _add_output_layers(
    program: DecodeProgram, parts: DecoderModules, builder: LayerBuilder, dtype: torch.dtype
) -> int:
    """Add the layers after the last block; return the index of the buffer of ``dtype`` logits."""
    x = program.add_buffer(len(parts.blocks[0].output.weight))
    for module in parts.final:
        if hasattr(module, "in_features"):
            layer = builder.join_linear_layers(module)
            y = program.add_buffer(len(layer.weight_OI))
            program.add_linear(layer, x=x, y=y)
            x = y
        else:
            program.add_norm(builder.norm_parameters(module), x=x, y=x)
    head = builder.join_linear_layers(parts.head)
    logits = program.add_buffer(len(head.weight_OI), dtype)
    program.add_linear(head, x=x, y=logits)
    return logits


def _list_newest_tokens(ids_B: Tensor, positions: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, rows and positions of one token for each of the first B rows."""
    return ids_B, torch.arange(len(ids_B)), torch.tensor(positions)


def _list_text_tokens(texts: Texts, first_row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, rows and positions of the texts' tokens, one text after the other."""
    ids_NP, lengths, starts = texts
    places_NP = torch.arange(ids_NP.shape[1]).expand_as(ids_NP)
    rows_N, lengths_N = torch.arange(len(ids_NP)) + first_row, torch.tensor(lengths)
    keep_NP = places_NP < lengths_N[:, None]
    if starts is not None:
        places_NP = places_NP + torch.tensor(starts)[:, None]
    return ids_NP[keep_NP], rows_N.repeat_interleave(lengths_N), places_NP[keep_NP]


def _last_token_indices(lengths: list[int]) -> Tensor:
    """Return the index of each prompt's last token in the list of all prompts' tokens."""
    return torch.tensor(list(accumulate(lengths))) - 1
