"""Continuous batching: rows that ended leave, and waiting prompts take their place.

Shapes: B = rows in use, J = prompts that join, N = responses to make, P = prompt tokens,
V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf.rollout.decoders.decoder import Decoder, PackingDecoder
from rlhf.rollout.sampling import SamplingSettings, draw_tokens
from rlhf.rollout.stopping import StopTexts

PREFILL_TOKENS = 8192  # prompt tokens taken in at once: bounds the memory of a prefill
JOINING_SHARE = 8  # where joining takes a pass of its own, 1 of so many rows must be free


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
        # By length, so that prompts of a prefill are alike; equal prompts become neighbours.
        waiting = sorted(requests, key=lambda r: (len(r.prompt), r.prompt), reverse=True)
        while self._anyone_works(bool(waiting or self._active)):
            joining = self._next_joining(waiting)
            del waiting[: len(joining)]
            if joining:
                requests, logits_BV = self._join(joining, draws_NT.device)
            elif self._active:
                requests = self._active
                logits_BV = self._decoder.decode(*self._newest(draws_NT.device))
            else:
                self._decoder.decode(torch.zeros(1, dtype=torch.long, device=draws_NT.device), [0])
                continue
            self._extend(requests, logits_BV, draws_NT)
            self._leave()

    def _next_joining(self, waiting: Sequence[Request]) -> list[Request]:
        """The first of ``waiting`` that fit into the free rows and one prefill; none: not yet."""
        free = self._max_rows - len(self._active)
        packs = isinstance(self._decoder, PackingDecoder)
        fewest = 1 if packs else max(1, self._max_rows // JOINING_SHARE)
        if not waiting or (self._active and free < fewest):
            return []
        fitting = max(1, PREFILL_TOKENS // len(waiting[0].prompt))
        return list(waiting[: min(free, fitting)])

    def _newest(self, device: torch.device) -> tuple[Tensor, list[int]]:
        """The newest token (B,) of each request in work, and where it stands."""
        newest = [request.ids[-1] for request in self._active]
        return torch.tensor(newest, device=device), [r.position for r in self._active]

    def _join(self, joining: list[Request], device: torch.device) -> tuple[list[Request], Tensor]:
        """Requests that get a token now, and their logits (B, V): ``joining``, and maybe all.

        Equal prompts, which are neighbours, are run once and copied.
        """
        groups = [list(group) for _, group in groupby(joining, key=lambda r: r.prompt)]
        prompts = [torch.tensor(group[0].prompt) for group in groups]
        ids_JP = pad_sequence(prompts, batch_first=True).to(device)
        lengths = [len(prompt) for prompt in prompts]
        decoder, behind = self._decoder, len(self._active)
        if self._active and isinstance(decoder, PackingDecoder):
            first = 0
            logits_BV = decoder.decode_and_prefill(*self._newest(device), ids_JP, lengths)
        else:
            first = behind
            logits_BV = decoder.prefill(ids_JP, lengths, first_row=behind)
        self._active += [group[0] for group in groups]
        sources = list(range(len(logits_BV)))
        for row, group in enumerate(groups, start=behind):
            for request in group[1:]:
                decoder.copy_row(row, len(self._active), columns=len(request.prompt))
                self._active.append(request)
                sources.append(row - first)
        if len(sources) > len(logits_BV):
            logits_BV = logits_BV[torch.tensor(sources, device=device)]
        return self._active[first:], logits_BV

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
