"""Decode steps as CUDA graphs: Python launches a step once, then the GPU replays it.

Shapes: B = rows in use, R = rows of a graph or of the KV cache, N = requests, T = response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.base.types import copy_to_device
from rlhf.kernels.kernel_checks import use_if_equal
from rlhf.rollout.decoders.decoder import KvCache, Newest, Texts
from rlhf.rollout.decoders.fused import FusedDecoder
from rlhf.rollout.sampling import Drawn, SamplingSettings, draw_tokens, stack_token_logprobs

COLUMNS = 128  # the KV cache length of a graph is a multiple of this number
# Largest allowed share of rows whose token differs, and relative difference of their log-probs,
# between a graph and the same step launched by torch: a product may be summed in another order.
TOLERANCE = 0.1


class Extent(NamedTuple):
    """The size of the decoder that a rollout needs: rows, columns and random numbers."""

    rows: int  # number of rows of the KV cache that decode
    parked: int  # further rows of the KV cache, for paused requests
    columns: int  # columns of the KV cache, a multiple of COLUMNS
    requests: int
    draws: int  # maximum number of random numbers per request

    @classmethod
    def from_rollout(cls, rows: int, tokens: int, draws_NT: Tensor, *, parked: int = 0) -> Extent:
        """Return the extent to decode ``rows`` sequences of up to ``tokens`` tokens at once."""
        return cls(rows, parked, _round_up_columns(tokens), *draws_NT.shape)

    def covers(self, other: Extent) -> bool:
        """Return True if a decoder of this extent serves ``other`` with bit-identical results.

        The numbers of rows must be equal, because the shapes of the graphs depend on them.
        """
        return self.rows == other.rows and all(a >= b for a, b in zip(self, other, strict=True))


def _round_up_columns(tokens: int) -> int:
    """Return ``tokens`` rounded up to a multiple of ``COLUMNS``."""
    return -(-tokens // COLUMNS) * COLUMNS


class _Step(NamedTuple):
    drawn_2R: Tensor  # tokens and log-probs
    logits_RV: Tensor | None  # with top-p only: rows that the step cannot draw use them


class GraphedDecoder(KvCache):
    """A ``DrawingDecoder`` that captures the step of each shape once and then replays it.

    A step decodes tokens, draws the next tokens and stores them as its next input, all on the GPU:
    while no row joins or leaves, the host launches one graph and copies the drawn tokens. Shapes
    are few: the number of rows is rounded up to a power of two, and the length to a multiple of
    ``COLUMNS``. If a kernel reads only each row's own length, one graph serves all lengths.
    """

    rows_are_exact = FusedDecoder.rows_are_exact
    extends_together = FusedDecoder.extends_together

    def __init__(
        self,
        decoder: FusedDecoder,
        sampling: SamplingSettings,
        *,
        end_ids: Sequence[int],
        extent: Extent,
        weights: list[int],
    ) -> None:
        self._decoder = decoder
        self.sampling = sampling  # of the current rollout
        self._end_ids = end_ids
        self._extent = extent
        self._weights = weights  # addresses of the model's weights, which graphs read
        device = torch.device("cuda", torch.cuda.current_device())
        self._draws_NT = torch.empty(extent.requests, extent.draws, device=device)
        self._drawn_from: Tensor | None = None  # the tensor of which _draws_NT is a copy
        # The newest token of each row (the fields of Newest) on the GPU, and the host's copy.
        self._newest_4R = torch.zeros((4, extent.rows), dtype=torch.long, device=device)
        self._newest: list[Newest] = []
        self._replays: dict[Hashable, Callable[[], _Step] | None] = {}
        # Graphs can share one memory pool, since no two are replayed at the same time.
        self._pool = torch.cuda.graph_pool_handle()

    def can_serve(self, extent: Extent, weights: list[int]) -> bool:
        """Return True if this decoder is large enough and reads the weights at these addresses."""
        return self._extent.covers(extent) and weights == self._weights

    def refresh_weight_copies(self) -> None:
        """Update the cast copies of weights; weights in the decoder's precision have no copies."""
        self._decoder.refresh_weight_copies()

    def prefill(self, texts: Texts, *, first_row: int) -> Tensor:
        """Prefill texts into the rows from ``first_row`` on; return their logits (N, V)."""
        return self._decoder.prefill(texts, first_row=first_row)

    def decode_and_draw(self, newest: list[Newest], draws_NT: Tensor) -> Tensor:
        """Decode the ``newest`` tokens; return the next tokens and their log-probs (2, B)."""
        if draws_NT is not self._drawn_from:
            requests, tokens = draws_NT.shape
            self._draws_NT[:requests, :tokens].copy_(draws_NT)
            self._drawn_from = draws_NT
        used, longest = len(newest), max(row.position for row in newest) + 1
        rows = min(1 << (used - 1).bit_length(), self._extent.rows)
        whole = self._decoder.reads_whole_columns
        columns = _round_up_columns(longest) if whole else self._extent.columns
        replay = self._get_replay(rows, columns, last=longest - 1)
        if newest != self._newest:
            # Unused rows write to their column 0, which the next prompt in the row overwrites.
            unused = [Newest(0, 0, 0, 0)] * (self._extent.rows - used)
            state_4R = torch.tensor([*newest, *unused]).T.contiguous()
            self._newest_4R.copy_(state_4R.pin_memory(), non_blocking=True)
        step = self._decode_step(rows, columns) if replay is None else replay()
        drawn_2B = step.drawn_2R[:, :used].cpu()
        if step.logits_RV is not None:
            self._draw_large_nuclei(drawn_2B, step.logits_RV, newest)
        self._newest = [
            Newest(int(token), row.position + 1, row.request, row.step + 1)
            for token, row in zip(drawn_2B[0].tolist(), newest, strict=True)
        ]
        return drawn_2B

    def copy_row(self, source: int, target: int, *, columns: int) -> None:
        """Copy the KV cache of ``columns`` tokens from row ``source`` to row ``target``."""
        self._decoder.copy_row(source, target, columns=columns)

    def _decode_step(self, rows: int, columns: int) -> _Step:
        """Decode the newest tokens of the first ``rows`` rows and replace them with drawn tokens.

        The host never waits for the value of a tensor, so a CUDA graph can capture the step.
        """
        ids_R, positions_R, requests_R, steps_R = self._newest_4R[:, :rows]
        logits_RV = self._decoder.decode_on_device(ids_R, positions_R, columns=columns)
        drawn = self._draw_tokens(logits_RV, requests_R, steps_R, waits=False)
        ids_R.copy_(drawn.tokens_B)
        positions_R.add_(1)
        steps_R.add_(1)
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

    def _get_replay(self, rows: int, columns: int, *, last: int) -> Callable[[], _Step] | None:
        """Return the replay of this shape, captured on first use; None if torch launches the step.

        A capture overwrites the newest tokens, and the unused column ``last`` of the KV cache.
        """
        key, shape = (self.sampling, rows, columns), (rows, columns)
        if key not in self._replays:
            load = partial(self._capture_graph, *shape, last)
            compare = partial(self._compare_replay, *shape, last)
            self._replays[key] = use_if_equal("CUDA graphs", "cuda", load, compare, bound=TOLERANCE)
            self._newest = []
        return self._replays[key]

    def _capture_graph(self, rows: int, columns: int, last: int) -> Callable[[], _Step]:
        self._begin_trial(last)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode_step(rows, columns)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step = self._decode_step(rows, columns)

        def replay() -> _Step:
            graph.replay()
            return step

        return replay

    def _compare_replay(
        self, rows: int, columns: int, last: int, replay: Callable[[], _Step]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return what the graph draws, and what torch draws for the same step."""
        self._begin_trial(last)
        expected_2R = self._decode_step(rows, columns).drawn_2R
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
