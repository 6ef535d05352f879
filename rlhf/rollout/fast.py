"""Responses from this project's own decode loop, on the weights that are being trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf.config.choices import When
from rlhf.rollout.decoders.decoder import Decoder
from rlhf.rollout.decoders.families import Parts, parts_of
from rlhf.rollout.decoders.family import FamilyDecoder
from rlhf.rollout.decoders.general import GeneralDecoder
from rlhf.rollout.decoders.graphs import GraphedDecoder
from rlhf.rollout.sampling import SamplingSettings
from rlhf.rollout.scheduler import Request, Scheduler
from rlhf.rollout.stopping import StopTexts
from rlhf.types import Engine, PromptBatch, Ranks, Responses

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class FastSettings:
    """How the decode loop runs; the meanings are those of the config group ``rollout``."""

    dtype: torch.dtype
    max_rows: int | None
    gather_weights: When
    cuda_graphs: bool


class FastRollout:
    """Prefill and decode on preallocated memory with continuous batching; a ``RolloutBackend``.

    ``weight_of`` gives a linear layer's weight with its adapters merged in.
    """

    def __init__(
        self,
        sampling: SamplingSettings,
        settings: FastSettings,
        *,
        end_id: int,
        pad_id: int,
        stop: StopTexts,
        weight_of: Callable[[nn.Module], Tensor],
        ranks: Ranks,
    ) -> None:
        self._sampling = sampling
        self._settings = settings
        self._end_id = end_id
        self._pad_id = pad_id
        self._stop = stop
        self._weight_of = weight_of
        self._ranks = ranks

    def generate(
        self, actor: Engine, prompts: PromptBatch, *, limits: list[int] | None = None
    ) -> Responses:
        """One response per prompt, of at most ``limits`` tokens each (None: max_tokens)."""
        requests = self._requests(prompts, limits)
        tokens = max(len(request.prompt) + request.limit for request in requests)
        rows = min(self._settings.max_rows or len(requests), len(requests))
        with actor.evaluating() as module:
            model = getattr(module, "pretrained", module)
            parts = parts_of(model, tokens=tokens)
            gathers = parts is not None and self._gathers(actor, model)
            is_layerwise = actor.is_sharded and not gathers
            with actor.gathered(model) if gathers else nullcontext():
                decoder = self._decoder(model, None if is_layerwise else parts, rows, tokens)
                Scheduler(
                    decoder,
                    self._sampling,
                    end_id=self._end_id,
                    stop=self._stop,
                    max_rows=rows,
                    anyone_works=self._any_rank if is_layerwise else bool,
                ).run(requests, prompts.draws_BT)
        return self._responses(requests, prompts.ids_BP.device)

    def _requests(self, prompts: PromptBatch, limits: list[int] | None) -> list[Request]:
        return [
            Request(
                index,
                tuple(ids_P[attend_P].tolist()),
                self._sampling.max_tokens if limits is None else limits[index],
            )
            for index, (ids_P, attend_P) in enumerate(
                zip(prompts.ids_BP, prompts.attend_BP, strict=True)
            )
        ]

    def _decoder(
        self, model: PreTrainedModel, parts: Parts | None, rows: int, tokens: int
    ) -> Decoder:
        dtype, device = self._settings.dtype, self._ranks.device
        if parts is None:
            return GeneralDecoder(model, rows=rows, tokens=tokens, device=device, dtype=dtype)
        decoder = FamilyDecoder(parts, self._weight_of, rows=rows, tokens=tokens, dtype=dtype)
        if device.type == "cuda" and self._settings.cuda_graphs:
            return GraphedDecoder(decoder, rows=rows, tokens=tokens)
        return decoder

    def _gathers(self, actor: Engine, model: nn.Module) -> bool:
        """Whether sharded weights are made whole for the rollout; the same on every rank."""
        match self._settings.gather_weights:
            case _ if not actor.is_sharded:
                return False
            case When.auto:
                needed = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
                lacks = needed * self._settings.dtype.itemsize > free_bytes(self._ranks.device) / 2
                return not self._any_rank(lacks)
            case choice:
                return choice is When.always

    def _any_rank(self, here: bool) -> bool:
        return bool(self._ranks.max(torch.tensor(int(here), device=self._ranks.device)))

    def _responses(self, requests: list[Request], device: torch.device) -> Responses:
        longest = max(len(request.ids) for request in requests)
        shape = (len(requests), longest)
        ids_BT = torch.full(shape, self._pad_id)
        logprobs_BT, keep_BT = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        for row, request in enumerate(requests):
            size = len(request.ids)
            ids_BT[row, :size] = torch.tensor(request.ids)
            logprobs_BT[row, :size] = torch.tensor(request.logprobs)
            keep_BT[row, :size] = True
        ended_B = torch.tensor([request.has_ended for request in requests])
        return Responses(*(x.to(device) for x in (ids_BT, keep_BT, ended_B, logprobs_BT)))


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device, or on the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import os

    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
