"""Drawing tokens from logits. Shapes: B = sequences, V = vocabulary, C = chunks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.kernels.logprobs import LogprobKernel, logprob_kernel

CHUNK = 64  # tokens of the vocabulary whose probabilities are first summed in fp32
NUCLEUS = 256  # tokens that hold the share of top-p nearly always, so that not all need sorting


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How responses are sampled; the meanings are those of the config group ``rollout``."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_tokens: int = 0  # the end token cannot come before


class Drawn(NamedTuple):
    """Tokens that were drawn, and what the policy thought of them."""

    tokens_B: Tensor
    logprobs_B: Tensor  # nats, under softmax(logits / temperature), in fp32


def draw_tokens(
    logits_BV: Tensor,
    draws_B: Tensor,
    sampling: SamplingSettings,
    *,
    barred_B: Tensor | None = None,
    end_id: int | None = None,
) -> Drawn:
    """Tokens whose slice of the cumulative distribution holds the uniform ``draws``.

    One number in [0, 1) per row decides (inverse CDF), so the same draw gives the same token
    whatever else is in the batch. Rows that are ``barred`` cannot draw ``end_id``. The log-probs
    are those of ``token_logprobs``: before top-k, top-p and the bar.
    """
    kernel = _kernel_for(logits_BV, sampling)
    if kernel is not None:
        scale, end = 1 / sampling.temperature, -1 if end_id is None else end_id
        drawn = kernel.draw(logits_BV, draws_B, scale=scale, barred_N=barred_B, end_id=end)
        return Drawn(*drawn)
    logits_BV = logits_BV.float()
    if sampling.temperature != 1.0:
        logits_BV = logits_BV / sampling.temperature
    end_B1 = None
    if barred_B is not None:
        end_B1 = logits_BV[:, end_id, None].masked_fill(~barred_B[:, None], -torch.inf)
        logits_BV = logits_BV.clone()
        logits_BV[:, end_id].masked_fill_(barred_B, -torch.inf)
    probabilities_BV = logits_BV.softmax(dim=-1)
    if sampling.top_k == 1:
        tokens_B1 = logits_BV.argmax(dim=-1, keepdim=True)
    else:
        tokens_B1 = _inverse_cdf(truncated(probabilities_BV, sampling), draws_B.double()[:, None])
    logprobs_B1 = probabilities_BV.gather(1, tokens_B1).log()
    if end_B1 is not None:  # it counts again: log(sum of all) from log(sum of the others)
        drawn_B1 = logits_BV.gather(1, tokens_B1)
        logprobs_B1 = drawn_B1 - torch.logaddexp(drawn_B1 - logprobs_B1, end_B1)
    return Drawn(tokens_B1.squeeze(1), logprobs_B1.squeeze(1))


def truncated(probabilities_BV: Tensor, sampling: SamplingSettings) -> Tensor:
    """Probabilities of what top-k, then top-p, leave, others 0; they sum to what is left.

    top-k keeps the k likeliest tokens. top-p keeps the likeliest until they hold its share of what
    top-k left, the one that crosses it included. Tokens as likely as the last one stay too.
    """
    if 0 < sampling.top_k < probabilities_BV.shape[1]:
        smallest_B1 = probabilities_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        probabilities_BV = probabilities_BV.masked_fill(probabilities_BV < smallest_B1, 0.0)
    if sampling.top_p < 1.0:
        smallest_B1 = _last_of_share(probabilities_BV, sampling.top_p)
        probabilities_BV = probabilities_BV.masked_fill(probabilities_BV < smallest_B1, 0.0)
    return probabilities_BV


def _last_of_share(probabilities_BV: Tensor, share: float) -> Tensor:
    """Probability (B, 1) of the token with which the likeliest reach ``share`` of all."""
    total_B1 = probabilities_BV.sum(dim=-1, keepdim=True, dtype=torch.float64)
    wanted_B1 = (share - 1e-7) * total_B1  # as far off can fp32 probabilities be
    num_tokens = probabilities_BV.shape[1]
    size = min(NUCLEUS, num_tokens)
    while True:
        likeliest_BN = probabilities_BV.topk(size, dim=-1).values
        held_BN = likeliest_BN.double().cumsum(dim=-1)
        if size == num_tokens or bool((held_BN[:, -1:] >= wanted_B1).all()):
            last_B1 = torch.searchsorted(held_BN, wanted_B1).clamp(max=size - 1)
            return likeliest_BN.gather(1, last_B1)
        size = min(16 * size, num_tokens)


def _inverse_cdf(weights_BV: Tensor, draws_B1: Tensor) -> Tensor:
    """Tokens (B, 1) at which the cumulative weights pass the share ``draws`` of their sum.

    In two levels, since a sum in fp64 over the vocabulary takes longer than all else here: sums of
    chunks in fp32, then one chunk token by token. Sums over chunks are in fp64: in fp32 a large
    vocabulary would shift them.
    """
    num_rows, num_tokens = weights_BV.shape
    whole = num_tokens // CHUNK * CHUNK
    sums_BC = weights_BV[:, :whole].view(num_rows, whole // CHUNK, CHUNK).sum(dim=-1)
    if whole < num_tokens:
        rest_B1 = weights_BV[:, whole:].sum(dim=-1, keepdim=True)
        sums_BC = torch.cat([sums_BC, rest_B1], dim=1)
    ends_BC = sums_BC.cumsum(dim=-1, dtype=torch.float64)
    # Against the actual total: rounding leaves it a little off 1, and the draw must stay inside.
    targets_B1 = draws_B1 * ends_BC[:, -1:]
    chunk_B1 = _slice_of(targets_B1, ends_BC)
    within_B1 = 1.0 - (ends_BC.gather(1, chunk_B1) - targets_B1) / sums_BC.gather(1, chunk_B1)

    tokens_BN = chunk_B1 * CHUNK + torch.arange(CHUNK, device=chunk_B1.device)
    weights_BN = weights_BV.gather(1, tokens_BN.clamp(max=num_tokens - 1))
    if whole < num_tokens:
        weights_BN = weights_BN.masked_fill(tokens_BN >= num_tokens, 0.0)
    ends_BN = weights_BN.cumsum(dim=-1, dtype=torch.float64)
    targets_B1 = within_B1.clamp(0.0, 1.0 - 1e-12) * ends_BN[:, -1:]
    return tokens_BN.gather(1, _slice_of(targets_B1, ends_BN)).clamp(max=num_tokens - 1)


def _slice_of(targets_B1: Tensor, ends_BN: Tensor) -> Tensor:
    """Which slice, of those that end at ``ends``, holds the target; never beyond the last."""
    places_B1 = torch.searchsorted(ends_BN, targets_B1, right=True)
    return places_B1.clamp(max=ends_BN.shape[1] - 1)  # not a number is nowhere


def _kernel_for(logits_BV: Tensor, sampling: SamplingSettings) -> LogprobKernel | None:
    """What draws from the whole distribution in one pass; None where it cannot, or is not asked."""
    is_plain = sampling.top_k == 0 and sampling.top_p == 1.0 and logits_BV.is_contiguous()
    is_half_on_cpu = logits_BV.is_cpu and logits_BV.dtype is torch.bfloat16
    return logprob_kernel() if is_plain and is_half_on_cpu else None
