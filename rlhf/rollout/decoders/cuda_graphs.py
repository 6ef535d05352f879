"""Decode steps as CUDA graphs: Python launches a step once, then the GPU replays it."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.allocation_errors import is_out_of_memory
from rlhf.host_copies import sent
from rlhf.rollout.decoders.fused import FusedDecoder

logger = logging.getLogger(__name__)
NO_ROOM = (
    "rollout.cuda_graphs: no memory is left for another graph; decode steps of new shapes are "
    "launched one by one, which is slower (rollout.max_rows leaves more memory)"
)
COLUMNS = 128  # graphs are captured for multiples of this length


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    ids_B: Tensor
    positions_B: Tensor
    logits_BV: Tensor


class GraphedDecoder:
    """A ``Decoder`` that captures the decode step of each shape once and then replays it.

    To keep shapes few, rows are rounded up to a power of two, lengths to a multiple of ``COLUMNS``.
    """

    def __init__(self, decoder: FusedDecoder, *, rows: int, tokens: int) -> None:
        self._decoder = decoder
        self._rows = rows
        self._tokens = tokens
        self._graphs: dict[tuple[int, int], _Graph] = {}
        # One pool for all graphs, which are never replayed at the same time.
        self._pool = torch.cuda.graph_pool_handle()
        self._has_room = True

    def prefill(self, ids_BP: Tensor, lengths: list[int], *, first_row: int) -> Tensor:
        """Prefill prompts into the rows from ``first_row`` on; return their logits (B, V)."""
        return self._decoder.prefill(ids_BP, lengths, first_row=first_row)

    def decode(self, ids_B: Tensor, positions: list[int]) -> Tensor:
        """Decode one token for each of the first B rows, at its position; return logits (B, V)."""
        used = len(positions)
        rows = min(1 << (used - 1).bit_length(), self._rows)
        columns = min(-(-(max(positions) + 1) // COLUMNS) * COLUMNS, self._tokens)
        if not self._has_graph(rows, columns):
            return self._decoder.decode(ids_B, positions)
        graph, static_ids_B, static_positions_B, logits_BV = self._graphs[rows, columns]
        # Unused rows write to column 0 of the KV cache, which their next prompt overwrites.
        static_ids_B[:used] = ids_B
        static_positions_B[used:] = 0
        static_positions_B[:used] = sent(torch.tensor(positions), ids_B.device)
        graph.replay()
        return logits_BV[:used]

    def copy_row(self, source: int, target: int, *, columns: int) -> None:
        """Copy the KV cache of ``columns`` tokens from row ``source`` to row ``target``."""
        self._decoder.copy_row(source, target, columns=columns)

    def _has_graph(self, rows: int, columns: int) -> bool:
        """Capture the graph of this shape, unless it is there; return False if it has no room."""
        if (rows, columns) not in self._graphs and self._has_room:
            try:
                self._graphs[rows, columns] = self._captured(rows, columns)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._has_room = False
                logger.warning(NO_ROOM)
        return (rows, columns) in self._graphs

    def _captured(self, rows: int, columns: int) -> _Graph:
        device = torch.device("cuda", torch.cuda.current_device())
        ids_B = torch.zeros(rows, dtype=torch.long, device=device)
        # Capturing writes to the last column, which is written again before it is read.
        positions_B = torch.full_like(ids_B, columns - 1)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decoder.decode_within(ids_B, positions_B, columns=columns)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits_BV = self._decoder.decode_within(ids_B, positions_B, columns=columns)
        return _Graph(graph, ids_B, positions_B, logits_BV)
