"""Rollouts with this project's own decode loop, on the weights that are being trained.

Shapes: B = responses, T = tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from rlhf.base.cpu import available_memory_bytes
from rlhf.base.decoder_modules import DecoderModules, end_token_ids
from rlhf.base.ranks import Ranks
from rlhf.base.types import Engine, PromptBatch, Responses, copy_to_device, pad_rows
from rlhf.config.choices import When
from rlhf.rollout.decoders.compiled import build_compiled_decoder
from rlhf.rollout.decoders.cuda_graphs import Extent, GraphedDecoder
from rlhf.rollout.decoders.decoder import Decoder, DrawingDecoder
from rlhf.rollout.decoders.fused import FusedDecoder
from rlhf.rollout.decoders.layers import AdapterOf
from rlhf.rollout.decoders.projections import ACTIVATIONS
from rlhf.rollout.decoders.via_cache import CacheDecoder
from rlhf.rollout.sampling import SamplingSettings, StopTexts
from rlhf.rollout.scheduler import Pause, Request, Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class FastSettings:
    """Options of the decode loop; the config group ``rollout`` documents their meaning."""

    dtype: torch.dtype
    max_rows: int | None  # None if all responses are decoded at once
    mean_tokens: int | None  # of responses, for which the KV cache has room; None: for the longest
    gather_weights: When
    cuda_graphs: bool


@dataclass
class KeptDecoder:
    """The CUDA graphs and the KV cache that backends of a process share and keep for later."""

    decoder: GraphedDecoder | None = None


FindModules = Callable[..., DecoderModules | None]  # called as find_modules(model, tokens=MAXIMUM)


@dataclass
class FastRollout:
    """A ``RolloutBackend`` with a preallocated KV cache and continuous batching.

    ``adapter_of`` returns the adapter of a linear layer, or None. ``find_modules`` returns the
    modules of a model for fused decoding, or None to decode with the model's own ``forward``.
    """

    sampling: SamplingSettings
    settings: FastSettings
    pad_id: int
    stop: StopTexts
    adapter_of: AdapterOf
    find_modules: FindModules
    ranks: Ranks
    kept: KeptDecoder | None = None  # None if each rollout has its own graphs and KV cache

    def generate(
        self,
        actor: Engine,
        prompts: PromptBatch,
        *,
        limits: list[int] | None = None,
        prefixes: Sequence[list[int]] | None = None,
    ) -> Responses:
        """Return one response per prompt, of at most limits[i] (or else max_tokens) tokens.

        Response i begins with the tokens ``prefixes[i]``, whose log-probabilities are given as 0.
        """
        requests = self._build_requests(prompts, limits, prefixes)
        tokens = max(len(request.prompt) + request.limit for request in requests)
        self._answer_requests(actor, prompts, requests, tokens=tokens)
        return pad_responses(requests, pad_id=self.pad_id, device=prompts.ids_BP.device)

    def sample_conversations(
        self, actor: Engine, prompts: PromptBatch, pause: Pause, *, max_tokens: int
    ) -> list[Request]:
        """Sample a conversation per prompt, of at most ``max_tokens`` tokens; return the requests.

        Between two turns, ``pause`` provides the rows in which requests wait for observations.
        """
        requests = self._build_requests(prompts)
        tokens = max(len(request.prompt) for request in requests) + max_tokens
        self._answer_requests(actor, prompts, requests, tokens=tokens, pause=pause)
        return requests

    def _answer_requests(
        self,
        actor: Engine,
        prompts: PromptBatch,
        requests: list[Request],
        *,
        tokens: int,
        pause: Pause | None = None,
    ) -> None:
        """Generate all responses; each prompt plus response has at most ``tokens`` tokens."""
        rows = self.settings.max_rows or len(requests)
        parked = 0 if pause is None else rows
        with actor.evaluating() as module:
            model = getattr(module, "pretrained", module)
            parts = self.find_modules(model, tokens=tokens)
            if parts is not None and parts.activation not in ACTIVATIONS:
                parts = None
            gathers = parts is not None and self._should_gather_weights(actor, model)
            is_layerwise = actor.is_sharded and not gathers
            with actor.gather_parameters(model) if gathers else nullcontext():
                fused = None if is_layerwise else parts
                mean = None if parked else self._expect_tokens(tokens)
                extent = Extent.from_rollout(
                    rows, tokens, prompts.draws_BT, parked=parked, mean_tokens=mean
                )
                decoder = self._select_decoder(model, fused, extent, tokens=tokens)
                scheduler = Scheduler(
                    decoder,
                    self.sampling,
                    end_ids=end_token_ids(model),
                    stop=self.stop,
                    max_rows=rows,
                    any_rank_works=self.ranks.any if is_layerwise else bool,
                    pause=pause,
                )
                with self._autocast_context(decoder):
                    scheduler.run(requests, prompts.draws_BT)

    def _expect_tokens(self, tokens: int) -> int | None:
        """Return the expected tokens of a row that has at most ``tokens``; None if not known."""
        if self.settings.mean_tokens is None:
            return None
        return max(1, tokens - self.sampling.max_tokens + self.settings.mean_tokens)

    def _build_requests(
        self,
        prompts: PromptBatch,
        limits: list[int] | None = None,
        prefixes: Sequence[list[int]] | None = None,
    ) -> list[Request]:
        ids = unpad_prompts(prompts)
        limits = [self.sampling.max_tokens] * len(ids) if limits is None else limits
        prefixes = [[]] * len(ids) if prefixes is None else prefixes
        return [
            Request(index, tuple(prompt), limit, list(prefix), [0.0] * len(prefix))
            for index, (prompt, limit, prefix) in enumerate(zip(ids, limits, prefixes, strict=True))
        ]

    def _select_decoder(
        self,
        model: PreTrainedModel,
        parts: DecoderModules | None,
        extent: Extent,
        *,
        tokens: int,
    ) -> Decoder | DrawingDecoder:
        dtype, device = self.settings.dtype, self.ranks.device
        rows = extent.rows + extent.parked
        if parts is None:
            return CacheDecoder(model, rows=rows, tokens=tokens, device=device, dtype=dtype)
        if parts.tokens.weight.device.type == "cpu":
            sizes = {"rows": rows, "tokens": tokens}
            compiled = build_compiled_decoder(parts, self.adapter_of, **sizes, dtype=dtype)
            if compiled is not None:
                return compiled
        if device.type == "cuda" and self.settings.cuda_graphs:
            return self._get_graph_decoder(model, parts, extent)
        return FusedDecoder(parts, self.adapter_of, rows=rows, tokens=tokens, dtype=dtype)

    def _get_graph_decoder(
        self, model: PreTrainedModel, parts: DecoderModules, extent: Extent
    ) -> GraphedDecoder:
        """Return the decoder that was kept if it fits, otherwise a new decoder."""
        weights = [parameter.data_ptr() for parameter in model.parameters()]
        holder = self.kept or KeptDecoder()
        kept, holder.decoder = holder.decoder, None
        if kept is not None and kept.can_serve(extent, weights):
            kept.refresh_weight_copies()
            kept.sampling = self.sampling
            holder.decoder = kept
            return kept
        del kept  # frees the old decoder's memory before the new decoder allocates
        holder.decoder = GraphedDecoder(
            parts,
            self.adapter_of,
            self.sampling,
            end_ids=end_token_ids(model),
            extent=extent,
            dtype=self.settings.dtype,
            weights=weights,
        )
        return holder.decoder

    def _autocast_context(self, decoder: Decoder | DrawingDecoder) -> AbstractContextManager[None]:
        """Return a context that switches autocast off, except for ``CacheDecoder``.

        Other decoders compute in the precision of the KV cache. With autocast their norms would
        return fp32 on a GPU, and bf16 on a CPU.
        """
        if isinstance(decoder, CacheDecoder):
            return nullcontext()
        return torch.autocast(self.ranks.device.type, enabled=False)

    def _should_gather_weights(self, actor: Engine, model: nn.Module) -> bool:
        """Return True if the ranks, which all agree, should gather weights for a whole rollout."""
        match self.settings.gather_weights:
            case _ if not actor.is_sharded:
                return False
            case When.auto:
                needed = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
                lacks = needed * self.settings.dtype.itemsize > spare_bytes(self.ranks.device) / 2
                return not self.ranks.any(lacks)
            case choice:
                return choice is When.always


def spare_bytes(device: torch.device) -> int:
    """Return the free memory of the GPU, or of the host if ``device`` is a CPU, in bytes.

    Memory that torch reserves for later allocations counts as free; the driver counts it as used.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return available_memory_bytes()


class Sampled(NamedTuple):
    """One response: ids, log-probabilities, and True if an end token or stop text ended it."""

    ids: list[int]
    logprobs: list[float]
    has_ended: bool


def unpad_prompts(prompts: PromptBatch) -> list[list[int]]:
    """Return the token ids of each prompt without padding; this copies two tensors to the host."""
    rows = zip(prompts.ids_BP.tolist(), prompts.attend_BP.tolist(), strict=True)
    return [[i for i, attends in zip(*row, strict=True) if attends] for row in rows]


def pad_responses(
    answers: Sequence[Request | Sampled], *, pad_id: int, device: torch.device
) -> Responses:
    """Return the answers as right-padded ``Responses``; all their tokens count in the loss."""
    ids_BT, keep_BT = pad_rows([answer.ids for answer in answers], pad_id=pad_id)
    logprobs_N = torch.tensor([x for answer in answers for x in answer.logprobs])
    logprobs_BT = torch.zeros(keep_BT.shape).masked_scatter(keep_BT, logprobs_N)
    ended_B = torch.tensor([answer.has_ended for answer in answers])
    ids_BT, keep_BT, ended_B, logprobs_BT = (
        copy_to_device(each, device) for each in (ids_BT, keep_BT, ended_B, logprobs_BT)
    )
    return Responses(ids_BT, keep_BT, ended_B, logprobs_BT)
