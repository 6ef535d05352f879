"""Continuous batching: finished rows are removed, and waiting prompts take their place.

In a conversation, a row pauses when its turn is complete: its place is free for other requests
until an observation arrives. Then the observation is added to the row, and the next turn begins.

Shapes: B = rows in use, J = distinct prompts that join, N = responses to generate, P = prompt
tokens, T = response tokens, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf.base.heartbeat import beat
from rlhf.base.types import copy_to_device
from rlhf.rollout.decoders.decoder import Decoder, DrawingDecoder, Newest, PackingDecoder, Texts
from rlhf.rollout.sampling import SamplingSettings, StopTexts, draw_tokens, stack_token_logprobs

PREFILL_TOKENS = 8192  # maximum number of prompt tokens per prefill, which limits its memory
JOINING_DIVISOR = 8  # a prefill without decoding waits until 1/8 of the rows are free, or fewer
SPARE_TOKENS = 256  # a request joins if the KV cache has room for this many more tokens of each row


@dataclass
class Request:
    """A response that is being generated; in a conversation, observations separate its turns."""

    index: int  # row of the response in the batch
    prompt: tuple[int, ...]
    limit: int  # the current turn ends when ``ids`` has this length
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # 0 at observations
    has_ended: bool = False
    turn_starts: list[int] = field(default_factory=lambda: [0])  # indices in ids
    turn_ends: list[int] = field(default_factory=list)  # index in ids after each complete turn
    first_draw: int = 0  # column of the random draws at which the current turn begins

    @property
    def all_ids(self) -> tuple[int, ...]:
        """Return the token ids of the prompt and of the response so far."""
        return (*self.prompt, *self.ids)

    @property
    def newest_position(self) -> int:
        """Return the newest token's position in the prompt plus response, counted from 0."""
        return len(self.prompt) + len(self.ids) - 1

    @property
    def most_tokens(self) -> int:
        """Return the maximum number of tokens of the prompt and of the response so far."""
        return len(self.prompt) + self.limit

    @property
    def num_turn_tokens(self) -> int:
        """Return the number of tokens of the current turn."""
        return len(self.ids) - self.turn_starts[-1]

    @property
    def is_turn_complete(self) -> bool:
        """Return True if the current turn is complete."""
        return self.has_ended or len(self.ids) == self.limit

    def extend(self, observation: list[int], *, limit: int, first_draw: int) -> None:
        """Add the observation after a turn, and begin the next turn."""
        self.ids += observation
        self.logprobs += [0.0] * len(observation)
        self.turn_starts.append(len(self.ids))
        self.limit, self.first_draw, self.has_ended = limit, first_draw, False


class PausedRows(Protocol):
    """Decoder rows that do not decode, because their requests wait for an observation.

    A request whose turn is complete pauses here instead of leaving the decoder. It continues with
    the tokens that ``Request.extend`` adds, or ends.
    """

    def __len__(self) -> int:
        """Return the number of paused requests."""

    def add(self, row: int, request: Request) -> None:
        """Pause ``request``, whose turn is complete, and move its ``row`` to a paused row."""

    def fetch_observations(self, *, is_idle: bool) -> None:
        """Receive observations for paused requests; if ``is_idle``, wait for at least one."""

    def select_continuing(self, most: int) -> list[tuple[Request, list[int]]]:
        """Return up to ``most`` requests for the next pass, and the tokens to add to their rows."""

    def move_back(self, request: Request, row: int, *, columns: int) -> None:
        """Move the paused row of ``request``, which holds ``columns`` tokens, to row ``row``."""


# A function that builds the paused rows, given a decoder and the range of rows to use.
Pause = Callable[[Decoder | DrawingDecoder, range], PausedRows]


@dataclass
class Scheduler:
    """A loop that drives a decoder until every request has ended.

    Active request i uses row i of the decoder; when it ends, the last active request moves to its
    row. With ``pause``, a request whose turn is complete moves to a row from ``max_rows`` on, and
    waits there for an observation.

    ``any_rank_works(has_work)`` returns True if any rank has work left. If a forward pass needs all
    ranks, a rank that has finished runs dummy passes for the others.
    """

    decoder: Decoder | DrawingDecoder
    sampling: SamplingSettings
    end_ids: Sequence[int]
    stop: StopTexts
    max_rows: int
    any_rank_works: Callable[[bool], bool]
    pause: Pause | None = None
    _active: list[Request] = field(default_factory=list, init=False)
    _paused: PausedRows | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.pause is not None:
            self._paused = self.pause(self.decoder, range(self.max_rows, 2 * self.max_rows))

    def run(self, requests: Sequence[Request], draws_NT: Tensor) -> None:
        """Generate all responses; row ``request.index`` of ``draws_NT`` decides their tokens."""
        # Longest first: a prefill gets texts of similar length, and equal texts are adjacent.
        waiting = sorted(requests, key=lambda r: (len(r.all_ids), r.all_ids), reverse=True)
        while self.any_rank_works(bool(waiting or self._active or self._paused)):
            beat()
            if continued := self._select_continuing(waiting):
                requests, logits_BV = self._continue_requests(continued, draws_NT.device)
                drawn_2B = self._draw_tokens(requests, logits_BV, draws_NT)
            elif (joining := self._select_joining(waiting)) and not self._is_ahead:
                del waiting[: len(joining)]
                requests, logits_BV = self._prefill(joining, draws_NT.device)
                drawn_2B = self._draw_tokens(requests, logits_BV, draws_NT)
            elif self._active:
                waiting[:0] = self._preempt()
                requests, drawn_2B = self._active, self._decode(draws_NT, leads=not joining)
            else:  # nothing to do: other ranks work, or the last paused request has ended
                if not isinstance(self.decoder, DrawingDecoder):
                    ids_1 = torch.zeros(1, dtype=torch.long, device=draws_NT.device)
                    self.decoder.decode(ids_1, [0])
                continue
            self._append_tokens(requests, drawn_2B)
            self._free_rows_of_complete_turns()

    @property
    def _is_ahead(self) -> bool:
        """Return True if a step of active requests was launched that is to be read first."""
        decoder = self.decoder
        return bool(self._active) and isinstance(decoder, DrawingDecoder) and decoder.is_ahead

    def _decode(self, draws_NT: Tensor, *, leads: bool) -> Tensor:
        """Decode and draw a token for every active request; return tokens and log-probs (2, B).

        With ``leads`` the decoder may launch the next step before.
        """
        requests, decoder = self._active, self.decoder
        if isinstance(decoder, DrawingDecoder):
            steps = [
                (r.ids[-1], r.newest_position, r.index, r.first_draw + r.num_turn_tokens)
                for r in requests
            ]
            return decoder.decode_and_draw([Newest(*each) for each in steps], draws_NT, leads=leads)
        logits_BV = decoder.decode(*self._newest_tokens(draws_NT.device))
        return self._draw_tokens(requests, logits_BV, draws_NT)

    def _select_joining(self, waiting: Sequence[Request]) -> list[Request]:
        """Return the ``waiting`` requests to prefill next; none if the next pass should decode."""
        free = self.max_rows - len(self._active) - len(self._paused or ())
        free = self._count_fitting(waiting[:free])
        packs = isinstance(self.decoder, PackingDecoder)
        # A prefill takes about one step. To wait until k of R rows are free, with responses of T
        # tokens, wastes k / 2 rows, and one step in k * T / R: least with k = R * sqrt(2 / T).
        divisor = max(JOINING_DIVISOR, math.isqrt(self.sampling.max_tokens // 2))
        fewest = 1 if packs else max(1, self.max_rows // divisor)
        if not waiting or (self._active and free < fewest):
            return []
        fitting = max(1, PREFILL_TOKENS // len(waiting[0].all_ids))
        texts = groupby(waiting[:free], key=lambda r: r.all_ids)  # equal texts are prefilled once
        return [request for _, group in islice(texts, fitting) for request in group]

    def _count_fitting(self, joining: Sequence[Request]) -> int:
        """Return how many of ``joining`` fit into the KV cache beside the active requests."""
        requests = [*self._active, *joining]
        lengths = [min(r.newest_position + 1 + SPARE_TOKENS, r.most_tokens) for r in requests]
        while len(lengths) > len(self._active) and not self.decoder.has_room(lengths):
            lengths.pop()
        fewest = 0 if self._active else min(len(joining), 1)  # one row always fits
        return max(len(lengths) - len(self._active), fewest)

    def _preempt(self) -> list[Request]:
        """Free rows, the shortest first, until the others can grow; return their requests.

        These join again later: what they drew is prefilled like a prompt.
        """
        removed, active = [], self._active
        while not self.decoder.has_room([request.newest_position + 1 for request in active]):
            row = min(range(len(active)), key=lambda row: active[row].newest_position)
            removed.append(active[row])
            self._fill_row(row)
        return removed

    def _newest_tokens(self, device: torch.device) -> tuple[Tensor, list[int]]:
        """Return the newest tokens (B,) of the active requests, and their positions."""
        newest = [request.ids[-1] for request in self._active]
        positions = [request.newest_position for request in self._active]
        return copy_to_device(torch.tensor(newest), device), positions

    def _prefill(
        self, joining: list[Request], device: torch.device
    ) -> tuple[list[Request], Tensor]:
        """Prefill ``joining``; return the requests that draw a token next, and their logits.

        These are the ``joining`` requests or, if the same pass decodes, all active requests. Equal
        texts, which are adjacent, are prefilled once and copied.
        """
        groups = [list(group) for _, group in groupby(joining, key=lambda r: r.all_ids)]
        prompts = [torch.tensor(group[0].all_ids) for group in groups]
        ids_JP = copy_to_device(pad_sequence(prompts, batch_first=True), device)
        lengths = [len(prompt) for prompt in prompts]
        decoder, behind = self.decoder, len(self._active)
        first, logits_BV = self._prefill_texts(Texts(ids_JP, lengths))
        self._active += [group[0] for group in groups]
        sources = list(range(len(logits_BV)))
        for row, group in enumerate(groups, start=behind):
            for request in group[1:]:
                decoder.copy_row(row, len(self._active), columns=lengths[row - behind])
                self._active.append(request)
                sources.append(row - first)
        if len(sources) > len(logits_BV):
            logits_BV = logits_BV[copy_to_device(torch.tensor(sources), device)]
        return self._active[first:], logits_BV

    def _draw_tokens(self, requests: list[Request], logits_BV: Tensor, draws_NT: Tensor) -> Tensor:
        """Draw one more token for each of ``requests``; return tokens and log-probs (2, B)."""
        places = torch.tensor([[r.index, r.num_turn_tokens, r.first_draw] for r in requests])
        indices, steps, first = copy_to_device(places, draws_NT.device).unbind(1)
        fewest = min(request.num_turn_tokens for request in requests)
        barred_B = steps < self.sampling.min_tokens if fewest < self.sampling.min_tokens else None
        drawn = draw_tokens(
            logits_BV,
            draws_NT[indices, first + steps],
            self.sampling,
            barred_B=barred_B,
            end_ids=self.end_ids,
        )
        return stack_token_logprobs(drawn)

    def _append_tokens(self, requests: list[Request], drawn_2B: Tensor) -> None:
        for request, token, logprob in zip(requests, *drawn_2B.tolist(), strict=True):
            request.ids.append(int(token))
            request.logprobs.append(logprob)
            request.has_ended = int(token) in self.end_ids or self.stop.completes_stop_text(
                request.ids, first=request.turn_starts[-1]
            )

    def _free_rows_of_complete_turns(self) -> None:
        """Remove or pause requests with complete turns; the last row moves into each freed row."""
        if self._paused is not None:
            for row, request in enumerate(self._active):
                if request.is_turn_complete:
                    self._paused.add(row, request)
        for row in range(len(self._active)):
            while self._active and self._active[-1].is_turn_complete:
                self._active.pop()
            if row < len(self._active) and self._active[row].is_turn_complete:
                self._fill_row(row)

    def _fill_row(self, row: int) -> None:
        """Remove the request of ``row``; the last active request moves there, if it is another."""
        last = self._active.pop()
        if row < len(self._active):
            self.decoder.move_row(len(self._active), row, columns=last.newest_position)
            self._active[row] = last

    def _select_continuing(self, waiting: Sequence[Request]) -> list[tuple[Request, list[int]]]:
        """Return paused requests that continue in the next pass, with the tokens to add."""
        if not self._paused:
            return []
        self._paused.fetch_observations(is_idle=not (self._active or self._select_joining(waiting)))
        return self._paused.select_continuing(self.max_rows)

    def _continue_requests(
        self, continued: list[tuple[Request, list[int]]], device: torch.device
    ) -> tuple[list[Request], Tensor]:
        """Move the rows of paused requests behind the active rows, and prefill the ids to add.

        Return the requests that draw a token next, and their logits, like ``_prefill``.
        """
        paused, behind = self._paused, len(self._active)
        assert paused is not None
        lengths = [len(ids) for _, ids in continued]
        starts = [request.newest_position + 1 - len(ids) for request, ids in continued]
        for row, (request, _) in enumerate(continued, start=behind):
            paused.move_back(request, row, columns=starts[row - behind])
        added = [torch.tensor(ids) for _, ids in continued]
        ids_JP = copy_to_device(pad_sequence(added, batch_first=True), device)
        first, logits_BV = self._prefill_texts(Texts(ids_JP, lengths, starts))
        self._active += [request for request, _ in continued]
        return self._active[first:], logits_BV

    def _prefill_texts(self, texts: Texts) -> tuple[int, Tensor]:
        """Prefill rows behind the active rows; return the first row with logits, and logits (B, V).

        The same pass decodes the active rows if the decoder can do both.
        """
        decoder, behind = self.decoder, len(self._active)
        if self._active and isinstance(decoder, PackingDecoder):
            newest = self._newest_tokens(texts.ids_NP.device)
            return 0, decoder.decode_and_prefill(*newest, texts)
        return behind, decoder.prefill(texts, first_row=behind)
