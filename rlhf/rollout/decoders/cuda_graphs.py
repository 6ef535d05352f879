"""Decode steps as CUDA graphs: Python launches a step once, then the GPU replays it.

Shapes: B = rows in use, R = rows of a graph or of the KV cache, N = requests, T = response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.base.decoder_modules import DecoderModules
from rlhf.base.types import copy_to_device
from rlhf.kernels.gpu.attention_gpu import CHUNK, count_shared_pages
from rlhf.kernels.kernel_checks import use_if_equal
from rlhf.rollout.decoders.decoder import KvCache, Newest, Texts
from rlhf.rollout.decoders.fused import FusedDecoder
from rlhf.rollout.decoders.layers import AdapterOf
from rlhf.rollout.decoders.pages import PageTable
from rlhf.rollout.sampling import Drawn, SamplingSettings, draw_tokens, stack_token_logprobs

COLUMNS = 128  # the KV cache length of a graph is a multiple of this number
# Largest allowed share of rows whose token differs, and relative difference of their log-probs,
# between a graph and the same step launched by torch: a product may be summed in another order.
TOLERANCE = 0.1


class Extent(NamedTuple):
    """The size of the decoder that a rollout needs: rows, columns and random numbers."""

    rows: int  # number of rows of the KV cache that decode
    parked: int  # further rows of the KV cache, for paused requests
    columns: int  # most tokens of a row, a multiple of COLUMNS
    pages: int  # of CHUNK columns, which the rows share; 0 if each row has room for all columns
    requests: int
    draws: int  # maximum number of random numbers per request

    @classmethod
    def from_rollout(
        cls,
        rows: int,
        tokens: int,
        draws_NT: Tensor,
        *,
        parked: int = 0,
        mean_tokens: int | None = None,
    ) -> Extent:
        """Return the extent to decode ``rows`` sequences of up to ``tokens`` tokens at once.

        With ``mean_tokens``, the rows share pages for so many tokens per row.
        """
        pages = 0 if mean_tokens is None else count_shared_pages(rows, tokens, mean_tokens)
        return cls(rows, parked, _round_up_columns(tokens), pages, *draws_NT.shape)

    def covers(self, other: Extent) -> bool:
        """Return True if a decoder of this extent serves ``other`` with bit-identical results.

        The numbers of rows must be equal, because the shapes of the graphs depend on them. Shared
        pages hold fewer tokens than rows with a page each.
        """
        is_equal = self.rows == other.rows and bool(self.pages) == bool(other.pages)
        return is_equal and all(a >= b for a, b in zip(self, other, strict=True))


def _round_up_columns(tokens: int) -> int:
    """Return ``tokens`` rounded up to a multiple of ``COLUMNS``."""
    return -(-tokens // COLUMNS) * COLUMNS


class _Shape(NamedTuple):
    """What a captured graph depends on."""

    sampling: SamplingSettings
    rows: int
    columns: int


class _Step(NamedTuple):
    drawn_2R: Tensor  # tokens and log-probs
    logits_RV: Tensor | None  # with top-p only: rows that the step cannot draw use them


class _LaunchedStep(NamedTuple):
    """A step that the GPU may not have finished yet; rows are those of the GPU's KV cache."""

    rows: dict[int, Newest]  # the tokens that it decodes; of token -1 if the host has not read it
    drawn_2R: Tensor  # in the host's memory; valid after ``is_copied``
    is_copied: torch.cuda.Event
    logits_RV: Tensor | None

    def decodes(self, rows: dict[int, Newest]) -> bool:
        """Return True if the step decodes all tokens of ``rows``, and perhaps more."""
        return all(row in self.rows and self.rows[row][1:] == rows[row][1:] for row in rows)


class GraphedDecoder(KvCache):
    """A ``DrawingDecoder`` that captures the step of each shape once and then replays it.

    A step decodes tokens, draws the next tokens and stores them as its next input, all on the GPU:
    while no row joins or leaves, the host launches one graph and copies the drawn tokens. Shapes
    are few: the number of rows is rounded up to a power of two, and the length to a multiple of
    ``COLUMNS``. If a kernel reads only each row's own length, one graph serves all lengths up to
    ``CHUNK``, with one kernel less, and another graph all longer lengths.

    The next step is launched before the host reads a step's tokens, so that the GPU does not wait
    for the host. A row that has ended decodes on, unread, until a prefill needs it or fewer rows
    fit a smaller graph. With top-p no step is launched ahead, because rows may have to be drawn
    again.

    Rows take pages of the KV cache as they grow. Moving a row moves no keys and values.
    """

    rows_are_exact = FusedDecoder.rows_are_exact
    extends_together = FusedDecoder.extends_together

    def __init__(
        self,
        parts: DecoderModules,
        adapter_of: AdapterOf,
        sampling: SamplingSettings,
        *,
        end_ids: Sequence[int],
        extent: Extent,
        dtype: torch.dtype,
        weights: list[int],
    ) -> None:
        rows = extent.rows + extent.parked
        self._decoder = decoder = FusedDecoder(
            parts,
            adapter_of,
            rows=rows,
            tokens=extent.columns,
            dtype=dtype,
            num_pages=extent.pages,
        )
        self._pages = PageTable(decoder.attention)
        self.sampling = sampling  # of the current rollout
        self._end_ids = end_ids
        self._extent = extent
        self._weights = weights  # addresses of the model's weights, which graphs read
        device = torch.device("cuda", torch.cuda.current_device())
        self._draws_NT = torch.zeros(extent.requests, extent.draws, device=device)
        self._drawn_from: Tensor | None = None  # the tensor of which _draws_NT is a copy
        # The newest token of each row (the fields of Newest) on the GPU, and those the host knows.
        self._newest_4R = torch.zeros((4, extent.rows), dtype=torch.long, device=device)
        self._known: dict[int, Newest] = {}
        # What a step adds to these fields, and their largest values, which rows that ended keep.
        any_id = torch.iinfo(torch.long).max
        largest = [any_id, decoder.last_position, any_id, extent.draws - 1]
        added_and_largest = torch.tensor([[0, 1, 0, 1], largest], device=device)
        self._added_41, self._largest_41 = added_and_largest[..., None].unbind()
        self._places = list(range(rows))  # each row's row of the graphs and of the page table
        self._next: _LaunchedStep | None = None  # the step that was launched ahead
        # A step's tokens are copied to one buffer while the host reads the other.
        self._buffers = [*torch.zeros(2, 2 * extent.rows, dtype=torch.float64).pin_memory()]
        self._replays: dict[_Shape, Callable[[], _Step] | None] = {}
        # Graphs can share one memory pool, since no two are replayed at the same time.
        self._pool = torch.cuda.graph_pool_handle()

    def can_serve(self, extent: Extent, weights: list[int]) -> bool:
        """Return True if this decoder is large enough and reads the weights at these addresses."""
        return self._extent.covers(extent) and weights == self._weights

    def refresh_weight_copies(self) -> None:
        """Update the cast copies of weights; weights in the decoder's precision have no copies."""
        self._decoder.refresh_weight_copies()

    @property
    def is_ahead(self) -> bool:
        """Return True if a step has been launched whose tokens nobody has read."""
        return self._next is not None

    def prefill(self, texts: Texts, *, first_row: int) -> Tensor:
        """Prefill texts into the rows from ``first_row`` on; return their logits (N, V)."""
        starts = texts.starts or [0] * len(texts.lengths)
        self._put_rows_in_place(first_row + (len(starts) if texts.starts else 0))
        ends = [start + length for start, length in zip(starts, texts.lengths, strict=True)]
        self._pages.extend(dict(enumerate(ends, start=first_row)))
        self._pages.upload()
        return self._decoder.prefill(texts, first_row=first_row)

    def has_room(self, lengths: Sequence[int]) -> bool:
        """Return True if there are pages for rows of these ``lengths``, in tokens."""
        return self._pages.has_room(lengths)

    def _extend_rows(self, rows: dict[int, Newest]) -> bool:
        """Give ``rows`` the pages that they need for these tokens; return False if too few."""
        return self._pages.extend({row: each.position + 1 for row, each in rows.items()})

    def decode_and_draw(
        self, newest: list[Newest], draws_NT: Tensor, *, leads: bool = True
    ) -> Tensor:
        """Decode the ``newest`` tokens; return the next tokens and their log-probs (2, B).

        With ``leads`` a further step of these rows, or of fewer, may be launched ahead.
        """
        if draws_NT is not self._drawn_from:
            requests, tokens = draws_NT.shape
            self._draws_NT[:requests, :tokens].copy_(draws_NT)
            self._drawn_from, self._next = draws_NT, None
        step, self._next = self._next, None
        rows = dict(zip(self._places, newest, strict=False))
        if step is None or not step.decodes(rows):
            self._put_rows_in_place(len(newest))
            rows = dict(enumerate(newest))
            has_pages = self._extend_rows(rows)
            assert has_pages, "the caller asks has_room before rows grow"
            step = self._launch(rows)
        fits_smaller_graph = self._num_rows(len(newest)) < self._num_rows(max(rows) + 1)
        leads &= self.sampling.top_p >= 1.0 and not fits_smaller_graph
        following = {row: _successor(each, -1) for row, each in rows.items()}
        leads &= self._shape_of(following) in self._replays  # a capture would lose the tokens
        if leads and self._extend_rows(following):
            self._next = self._launch(following)
        step.is_copied.synchronize()
        drawn_2B = step.drawn_2R[:, list(rows)]
        if step.logits_RV is not None:
            self._draw_large_nuclei(drawn_2B, step.logits_RV, newest)
        if self._next is None:
            pairs = zip(rows.items(), drawn_2B[0].tolist(), strict=True)
            self._known = {row: _successor(each, token) for (row, each), token in pairs}
        return drawn_2B

    def _launch(self, rows: dict[int, Newest]) -> _LaunchedStep:
        """Launch the step that decodes ``rows``; tokens of -1 are on the GPU already."""
        shape, last = self._shape_of(rows), max(each.position for each in rows.values())
        self._pages.upload()
        replay = self._get_replay(shape, last=last)
        is_known = all(each.token < 0 or self._known.get(row) == each for row, each in rows.items())
        if not is_known:
            # Unused rows have no pages: they write to a page that nobody reads.
            newest = [rows.get(row, Newest(0, 0, 0, 0)) for row in range(self._extent.rows)]
            newest_4R = torch.tensor(newest).T.contiguous()
            self._newest_4R.copy_(newest_4R.pin_memory(), non_blocking=True)
        self._known = {}
        step = self._decode_step(shape) if replay is None else replay()
        self._buffers.reverse()
        drawn_2R = self._buffers[0][: step.drawn_2R.numel()].view(2, -1)
        drawn_2R.copy_(step.drawn_2R, non_blocking=True)
        is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        is_copied.record()
        return _LaunchedStep(rows, drawn_2R, is_copied, step.logits_RV)

    def _shape_of(self, rows: dict[int, Newest]) -> _Shape:
        """Return the shape of the step that decodes ``rows``."""
        longest = max(each.position for each in rows.values()) + 1
        columns = self._extent.columns
        if self._decoder.attention.reads_whole_columns:
            columns = _round_up_columns(longest)
        elif longest <= CHUNK:
            columns = min(columns, CHUNK)
        return _Shape(self.sampling, self._num_rows(max(rows) + 1), columns)

    def _num_rows(self, used: int) -> int:
        """Return the number of rows of the graph that decodes the first ``used`` rows."""
        return min(1 << (used - 1).bit_length(), self._extent.rows)

    def _put_rows_in_place(self, count: int) -> None:
        """Make the first ``count`` rows those of the same numbers in the table, and free others."""
        self._pages.keep(self._places[:count], below=self._extent.rows)
        self._places.sort()

    def move_row(self, source: int, target: int, *, columns: int) -> None:  # noqa: ARG002
        """Move row ``source`` to ``target`` by moving its pages, or the place of its pages."""
        places, decodes = self._places, [row < self._extent.rows for row in (source, target)]
        if all(decodes):
            places[source], places[target] = places[target], places[source]
            return
        if decodes[1]:
            self._put_rows_in_place(target)
        self._pages.move(places[source], places[target])

    def copy_row(self, source: int, target: int, *, columns: int) -> None:
        """Copy the KV cache of ``columns`` tokens from row ``source`` to row ``target``."""
        source, target = self._places[source], self._places[target]
        self._pages.extend({target: columns})
        self._pages.copy(source, target, columns=columns)

    def _decode_step(self, shape: _Shape) -> _Step:
        """Decode the newest tokens of the first rows and replace them with drawn tokens.

        The host never waits for the value of a tensor, so a CUDA graph can capture the step.
        """
        newest_4R = self._newest_4R[:, : shape.rows]
        ids_R, positions_R, requests_R, steps_R = newest_4R
        logits_RV = self._decoder.decode_on_device(ids_R, positions_R, columns=shape.columns)
        drawn = self._draw_tokens(logits_RV, requests_R, steps_R, waits=False)
        ids_R.copy_(drawn.tokens_B)
        newest_4R.add_(self._added_41).clamp_(max=self._largest_41)
        needs_logits = self.sampling.top_p < 1
        return _Step(stack_token_logprobs(drawn), logits_RV if needs_logits else None)

    def _draw_tokens(
        self, logits_BV: Tensor, requests_B: Tensor, steps_B: Tensor, *, waits: bool
    ) -> Drawn:
        fewest = self.sampling.min_tokens
        return draw_tokens(
            logits_BV,
            self._draws_NT[requests_B, steps_B],
            self.sampling,
            barred_B=steps_B < fewest if fewest else None,
            end_ids=self._end_ids,
            waits=waits,
        )

    def _draw_large_nuclei(
        self, drawn_2B: Tensor, logits_RV: Tensor, newest: Sequence[Newest]
    ) -> None:
        """Draw tokens that the step left out; set them in ``drawn_2B`` and in the GPU's next input.

        ``newest`` are the tokens before the step. This waits for the GPU, as the caller just did.
        """
        lacking = drawn_2B[1].isneginf().nonzero()[:, 0].tolist()
        if not lacking:
            return
        places = [(row, newest[row].request, newest[row].step) for row in lacking]
        rows_N, *places_N = copy_to_device(torch.tensor(places), logits_RV.device).unbind(1)
        drawn = self._draw_tokens(logits_RV[rows_N], *places_N, waits=True)
        self._newest_4R[0, rows_N] = drawn.tokens_B
        drawn_2B[:, lacking] = stack_token_logprobs(drawn).cpu()

    def _get_replay(self, shape: _Shape, *, last: int) -> Callable[[], _Step] | None:
        """Return the replay of this shape, captured on first use; None if torch launches the step.

        A capture overwrites the newest tokens, and the unused column ``last`` of the KV cache.
        """
        if shape not in self._replays:
            capture = partial(self._capture_graph, shape, last)
            compare = partial(self._compare_replay, shape, last)
            self._replays[shape] = use_if_equal(
                "CUDA graphs", "cuda", capture, compare, bound=TOLERANCE
            )
            self._known = {}
        return self._replays[shape]

    def _capture_graph(self, shape: _Shape, last: int) -> Callable[[], _Step]:
        self._begin_trial(last)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode_step(shape)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step = self._decode_step(shape)

        def replay() -> _Step:
            graph.replay()
            return step

        return replay

    def _compare_replay(
        self, shape: _Shape, last: int, replay: Callable[[], _Step]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return what the graph draws, and what torch draws for the same step."""
        self._begin_trial(last)
        expected_2R = self._decode_step(shape).drawn_2R
        self._begin_trial(last)
        replayed_2R = replay().drawn_2R
        is_same_R = replayed_2R[0] == expected_2R[0]
        # A row that the step cannot draw without waiting has the log-prob -inf.
        is_drawn_R = is_same_R & expected_2R[1].isfinite()
        logprobs = [each_2R[1].where(is_drawn_R, 0.0) for each_2R in (replayed_2R, expected_2R)]
        return [(is_same_R.double().mean(), torch.ones(())), (logprobs[0], logprobs[1])]

    def _begin_trial(self, last: int) -> None:
        """Let the next step write to column ``last``, which is written again before it is read."""
        self._newest_4R.zero_()[1] = last


def _successor(row: Newest, token: float) -> Newest:
    """Return the newest token of ``row`` after a step that draws ``token``."""
    return Newest(int(token), row.position + 1, row.request, row.step + 1)
