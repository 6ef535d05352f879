"""Log-probabilities of tokens. Shapes: B = sequences, T = tokens, V = vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class TokenLogprobs(NamedTuple):
    """What a policy thinks of the tokens that were sampled."""

    logprobs_BT: Tensor  # log pi(token), nats
    entropy_BT: Tensor  # entropy of the whole distribution, nats


def token_logprobs(
    logits_BTV: Tensor,
    ids_BT: Tensor,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> TokenLogprobs:
    """Log-probability of each token under softmax(logits / temperature), in fp32.

    The temperature is the one that the tokens were sampled with: otherwise the ratio of PPO would
    compare two different policies. The entropy carries a gradient only where it is asked for.
    """
    logits_BTV = logits_BTV.float() / temperature
    log_softmax_BTV = functional.log_softmax(logits_BTV, dim=-1)
    logprobs_BT = log_softmax_BTV.gather(-1, ids_BT[..., None]).squeeze(-1)
    if not entropy_gradient:
        log_softmax_BTV = log_softmax_BTV.detach()
    # entr(p) = -p log p. A token that cannot come adds nothing; entr's slope at p = 0 is infinite.
    probs_BTV = log_softmax_BTV.exp().clamp(min=torch.finfo(torch.float32).tiny)
    entropy_BT = torch.special.entr(probs_BTV).sum(dim=-1)
    return TokenLogprobs(logprobs_BT, entropy_BT)
