"""Continuous batching: rows that ended leave, and waiting prompts take their place.

Shapes: B = rows in use, N = responses to make, P = prompt tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf.rollout.decoders.decoder import Decoder
from rlhf.rollout.sampling import SamplingSettings, draw_tokens
from rlhf.rollout.stopping import StopTexts

PREFILL_TOKENS = 8192  # prompt tokens taken in at once: bounds the memory of a prefill
JOINING_SHARE = 8  # waiting prompts join once 1 of so many rows is free


@dataclass
class Request:
    """A response in the making."""

    index: int  # of the response among all
    prompt: tuple[int, ...]
    limit: int  # tokens, at most
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    has_ended: bool = False

    @property
    def position(self) -> int:
        """Where its newest token stands."""
        return len(self.prompt) + len(self.ids) - 1

    @property
    def is_answered(self) -> bool:
        """Whether nothing follows."""
        return self.has_ended or len(self.ids) == self.limit


class Scheduler:
    """Drives a decoder until every request is answered.

    The requests in work are the decoder's first rows, in this order: one that ends is replaced by
    the last. ``anyone_works`` says whether any rank is still at work, given whether this one is:
    where a forward pass needs all ranks, one that has finished goes on in vain.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampling: SamplingSettings,
        *,
        end_id: int,
        stop: StopTexts,
        max_rows: int,
        anyone_works: Callable[[bool], bool],
    ) -> None:
        self._decoder = decoder
        self._sampling = sampling
        self._end_id = end_id
        self._stop = stop
        self._max_rows = max_rows
        self._anyone_works = anyone_works
        self._active: list[Request] = []

    def run(self, requests: Sequence[Request], draws_NT: Tensor) -> None:
        """Answer all ``requests``; row n of ``draws_NT`` decides the tokens of request n."""
        # By length, so that prompts of a prefill are alike; equal prompts are neighbours.
        waiting = sorted(requests, key=lambda r: (len(r.prompt), r.prompt), reverse=True)
        while self._anyone_works(bool(waiting or self._active)):
            free = self._max_rows - len(self._active)
            if waiting and (not self._active or free >= max(1, self._max_rows // JOINING_SHARE)):
                joining = _next_prefill(waiting, free)
                del waiting[: len(joining)]
                first = len(self._active)
                logits_BV = self._join(joining, draws_NT.device)
            elif self._active:
                first = 0
                newest = [request.ids[-1] for request in self._active]
                logits_BV = self._decoder.decode(
                    torch.tensor(newest, device=draws_NT.device),
                    [request.position for request in self._active],
                )
            else:
                self._decoder.decode(torch.zeros(1, dtype=torch.long, device=draws_NT.device), [0])
                continue
            self._extend(self._active[first:], logits_BV, draws_NT)
            self._leave()

    def _join(self, joining: list[Request], device: torch.device) -> Tensor:
        """Logits (B, V) of the joining requests; equal prompts are run once, and copied."""
        rows: dict[tuple[int, ...], int] = {}
        copies = []
        for request in joining:
            if request.prompt in rows:
                copies.append(request)
            else:
                rows[request.prompt] = len(rows)
                self._active.append(request)
        first = len(self._active) - len(rows)
        lengths = [len(prompt) for prompt in rows]
        ids_BP = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for row, prompt in enumerate(rows):
            ids_BP[row, : len(prompt)] = torch.tensor(prompt)
        logits_BV = self._decoder.prefill(ids_BP.to(device), lengths, first_row=first)
        for request in copies:
            source, target = first + rows[request.prompt], len(self._active)
            self._decoder.copy_row(source, target, columns=len(request.prompt))
            self._active.append(request)
        sources = [*range(len(rows)), *(rows[request.prompt] for request in copies)]
        return logits_BV[torch.tensor(sources, device=device)] if copies else logits_BV

    def _extend(self, requests: list[Request], logits_BV: Tensor, draws_NT: Tensor) -> None:
        """One more token for each of ``requests``."""
        indices = torch.tensor([r.index for r in requests], device=draws_NT.device)
        steps = torch.tensor([len(r.ids) for r in requests], device=draws_NT.device)
        fewest = min(len(request.ids) for request in requests)
        barred_B = steps < self._sampling.min_tokens if fewest < self._sampling.min_tokens else None
        drawn = draw_tokens(
            logits_BV,
            draws_NT[indices, steps],
            self._sampling,
            barred_B=barred_B,
            end_id=self._end_id,
        )
        tokens, logprobs = drawn.tokens_B.tolist(), drawn.logprobs_B.tolist()
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            request.has_ended = token == self._end_id or self._stop.ends(request.ids)

    def _leave(self) -> None:
        """Take out requests that are answered; the last row moves into the gap."""
        for row in range(len(self._active)):
            while self._active and self._active[-1].is_answered:
                self._active.pop()
            if row < len(self._active) and self._active[row].is_answered:
                last = self._active.pop()
                self._decoder.copy_row(len(self._active), row, columns=last.position)
                self._active[row] = last


def _next_prefill(waiting: Sequence[Request], free: int) -> list[Request]:
    """The first of ``waiting`` that fit into ``free`` rows and one prefill; at least one."""
    widest = len(waiting[0].prompt)
    return list(waiting[: max(1, min(free, PREFILL_TOKENS // widest))])
