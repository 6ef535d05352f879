"""Sample tokens from logits, and find stop texts in responses.

Shapes: B = sequences, V = vocabulary, C = vocabulary chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rlhf.kernels import kernels_for
from rlhf.kernels.interfaces import DrawKernel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 64  # tokens per vocabulary chunk; probabilities within a chunk are summed in fp32
NUCLEUS = 256  # tokens that are sorted first for top-p; more are sorted only if needed
REPLACEMENT = "\ufffd"  # the character that stands for an incomplete character in decoded text
MARGIN = 4  # extra tokens to decode, since the first tokens may be parts of a character


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Options for sampling responses; the config group ``rollout`` documents their meaning."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float = 0.0
    min_tokens: int = 0  # no end token can be drawn before this many tokens


class Drawn(NamedTuple):
    """Drawn tokens and their log-probabilities under the policy."""

    tokens_B: Tensor
    logprobs_B: Tensor  # nats, under softmax(logits / temperature), in fp32


def draw_tokens(
    logits_BV: Tensor,
    draws_B: Tensor,
    sampling: SamplingSettings,
    *,
    barred_B: Tensor | None = None,
    end_ids: Sequence[int] = (),
    waits: bool = True,
) -> Drawn:
    """Draw one token per row by inverse CDF and return it with its log-probability.

    ``draws_B`` holds one uniform number in [0, 1) per row, so the same draw gives the same token
    whatever else is in the batch. Rows where ``barred_B`` is True cannot draw ``end_ids``. The
    log-probs equal the results of ``token_logprobs``: they ignore min-p, top-k, top-p and
    ``barred_B``.
    With top-p the host waits for the number of tokens to sort. Without ``waits`` it does not, and
    rows that keep more than ``NUCLEUS`` tokens get no valid token and the log-probability -inf.
    """
    bars = barred_B is not None or sampling.min_tokens > 0
    kernel = _select_draw_kernel(logits_BV, sampling)
    if kernel is not None and (len(end_ids) == 1 or not bars):  # a kernel bars only one id
        scale, end = 1 / sampling.temperature, end_ids[0] if end_ids else -1
        drawn = kernel.draw(logits_BV, draws_B, scale=scale, barred_N=barred_B, end_id=end)
        return Drawn(*drawn)
    logits_BV = logits_BV.float()
    if sampling.temperature != 1.0:
        logits_BV = logits_BV / sampling.temperature
    end_B1 = None
    if barred_B is not None:
        ends_BE = torch.stack([logits_BV[:, end] for end in end_ids], dim=1)
        end_B1 = ends_BE.logsumexp(1, keepdim=True).masked_fill(~barred_B[:, None], -torch.inf)
        logits_BV = logits_BV.clone()
        for end in end_ids:
            logits_BV[:, end].masked_fill_(barred_B, -torch.inf)
    weights_BV = logits_BV.softmax(dim=-1)
    if sampling.top_k == 1:
        tokens_B1 = logits_BV.argmax(dim=-1, keepdim=True)
    else:
        weights_BV = truncate_probabilities(weights_BV, sampling, waits=waits)
        tokens_B1 = _draw_by_inverse_cdf(weights_BV, draws_B.double()[:, None])
    logprobs_B1 = weights_BV.gather(1, tokens_B1).log()  # under the distribution before truncation
    if end_B1 is not None:  # add the barred end tokens to the normalising sum again
        drawn_B1 = logits_BV.gather(1, tokens_B1)
        logprobs_B1 = drawn_B1 - torch.logaddexp(drawn_B1 - logprobs_B1, end_B1)
    return Drawn(tokens_B1.squeeze(1), logprobs_B1.squeeze(1))


def stack_token_logprobs(drawn: Drawn) -> Tensor:
    """Return tokens and log-probs as one tensor (2, B), so that one copy moves both to the host.

    fp64 represents both exactly.
    """
    return torch.stack([drawn.tokens_B.double(), drawn.logprobs_B.double()])


def truncate_probabilities(
    probabilities_BV: Tensor, sampling: SamplingSettings, *, waits: bool = True
) -> Tensor:
    """Return the probabilities with tokens outside min-p, top-k and top-p set to 0.

    The three filters are applied in this order, as in vLLM; nothing is renormalised. min-p keeps
    tokens at least ``min_p`` times as likely as the likeliest, https://arxiv.org/abs/2407.01082.
    top-k keeps the k likeliest tokens. top-p keeps the fewest likeliest tokens that hold at least
    the share ``top_p`` of the remaining probability. Tokens as likely as the last kept token stay
    too. Without ``waits``, rows in which top-p keeps more than ``NUCLEUS`` tokens become all 0.
    """
    if sampling.min_p > 0.0:
        smallest_B1 = sampling.min_p * probabilities_BV.amax(dim=-1, keepdim=True)
        probabilities_BV = probabilities_BV.masked_fill(probabilities_BV < smallest_B1, 0.0)
    if 0 < sampling.top_k < probabilities_BV.shape[1]:
        smallest_B1 = probabilities_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        probabilities_BV = probabilities_BV.masked_fill(probabilities_BV < smallest_B1, 0.0)
    if sampling.top_p < 1.0:
        smallest_B1 = _nucleus_threshold(probabilities_BV, sampling.top_p, waits=waits)
        probabilities_BV = probabilities_BV.masked_fill(probabilities_BV < smallest_B1, 0.0)
    return probabilities_BV


def _nucleus_threshold(probabilities_BV: Tensor, share: float, *, waits: bool) -> Tensor:
    """Return the lowest probability (B, 1) in each row's nucleus, which holds ``share`` in all.

    A nucleus is the smallest set of likeliest tokens. Without ``waits``, return infinity for rows
    whose nucleus has more than ``NUCLEUS`` tokens.
    """
    total_B1 = probabilities_BV.sum(dim=-1, keepdim=True, dtype=torch.float64)
    wanted_B1 = (share - 1e-7) * total_B1  # the margin 1e-7 allows for the error of fp32 sums
    num_tokens = probabilities_BV.shape[1]
    size = min(NUCLEUS, num_tokens)
    while True:
        likeliest_BN = probabilities_BV.topk(size, dim=-1).values
        held_BN = likeliest_BN.double().cumsum(dim=-1)
        suffices_B1 = held_BN[:, -1:] >= wanted_B1
        if not waits or size == num_tokens or bool(suffices_B1.all()):
            last_B1 = torch.searchsorted(held_BN, wanted_B1).clamp(max=size - 1)
            return likeliest_BN.gather(1, last_B1).masked_fill(~suffices_B1, torch.inf)
        size = min(16 * size, num_tokens)


def _draw_by_inverse_cdf(weights_BV: Tensor, draws_B1: Tensor) -> Tensor:
    """Return the tokens (B, 1) at which the cumulative weights pass ``draws`` times the total.

    The search has two levels: first over chunks, each summed in fp32, then over the tokens of one
    chunk. An fp64 cumulative sum over the whole vocabulary would take longer than all other steps
    of sampling. Chunks are added in fp64, since fp32 errors would shift the drawn token.
    """
    num_rows, num_tokens = weights_BV.shape
    whole = num_tokens // CHUNK * CHUNK
    sums_BC = weights_BV[:, :whole].view(num_rows, whole // CHUNK, CHUNK).sum(dim=-1)
    if whole < num_tokens:
        rest_B1 = weights_BV[:, whole:].sum(dim=-1, keepdim=True)
        sums_BC = torch.cat([sums_BC, rest_B1], dim=1)
    ends_BC = sums_BC.cumsum(dim=-1, dtype=torch.float64)
    # Scale by the actual total, which rounding moves off 1: the draw must stay below the total.
    targets_B1 = draws_B1 * ends_BC[:, -1:]
    chunk_B1 = _find_slice(targets_B1, ends_BC)
    within_B1 = 1.0 - (ends_BC.gather(1, chunk_B1) - targets_B1) / sums_BC.gather(1, chunk_B1)

    tokens_BN = chunk_B1 * CHUNK + torch.arange(CHUNK, device=chunk_B1.device)
    weights_BN = weights_BV.gather(1, tokens_BN.clamp(max=num_tokens - 1))
    if whole < num_tokens:
        weights_BN = weights_BN.masked_fill(tokens_BN >= num_tokens, 0.0)
    ends_BN = weights_BN.cumsum(dim=-1, dtype=torch.float64)
    targets_B1 = within_B1.clamp(0.0, 1.0 - 1e-12) * ends_BN[:, -1:]
    return tokens_BN.gather(1, _find_slice(targets_B1, ends_BN)).clamp(max=num_tokens - 1)


def _find_slice(targets_B1: Tensor, ends_BN: Tensor) -> Tensor:
    """Return the index (B, 1) of the slice that holds each target, given the ends of the slices."""
    places_B1 = torch.searchsorted(ends_BN, targets_B1, right=True)
    return places_B1.clamp(max=ends_BN.shape[1] - 1)  # the index for NaN is past the end


def _select_draw_kernel(logits_BV: Tensor, sampling: SamplingSettings) -> DrawKernel | None:
    """Return the sampling kernel; None if ``sampling`` truncates, or no kernel fits the logits."""
    truncates = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    if truncates or not logits_BV.is_contiguous():
        return None
    return kernels_for(logits_BV.device.type).draw_kernel(logits_BV)


class StopTexts:
    """A detector of stop texts in a response that grows token by token.

    ``bool()`` of the detector is False if there are no ``texts``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = list(texts)
        # A token has at least one byte, so this many tokens contain any stop text that just ended.
        self._num_tokens = max((len(text.encode()) for text in texts), default=0) + MARGIN
        # A token that completes a stop text contains its last character, or the end of this
        # character's bytes. Except for a space: some decoders add spaces between tokens.
        lasts = {text[-1:] for text in texts}
        self._endings = {""} if " " in lasts else lasts | {REPLACEMENT}
        self._can_complete: dict[int, bool] = {}  # by token id

    def __bool__(self) -> bool:
        return bool(self._texts)

    def completes_stop_text(self, response_ids: list[int], *, first: int = 0) -> bool:
        """Return True if the last token completes a stop text in the tokens from ``first`` on.

        Call this after every token. Most tokens cannot complete a stop text; they cost no decoding.
        """
        if not self._texts:
            return False
        newest = response_ids[-1]
        if newest not in self._can_complete:
            text = self._decode([newest])
            self._can_complete[newest] = any(ending in text for ending in self._endings)
        if not self._can_complete[newest]:
            return False
        text = self._decode(response_ids[max(first, len(response_ids) - self._num_tokens) :])
        return any(stop in text for stop in self._texts)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids,
            skip_special_tokens=False,  # a special token can be a stop text too
            clean_up_tokenization_spaces=False,
        )
        return text
