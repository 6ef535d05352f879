"""Check that a fast generator agrees with the model's own forward pass.

Shapes: N = rows that are compared, T = response tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Largest allowed difference between two computations of a log-probability, in standard deviations
# of the log-probabilities over the vocabulary at that position; a wrong result is about 1 away.
TOLERANCES = {torch.float32: 0.02, torch.bfloat16: 0.1, torch.float16: 0.1}


class Greedy(NamedTuple):
    """Greedily decoded tokens (N, T) and their log-probabilities (N, T)."""

    ids_NT: Tensor
    logprobs_NT: Tensor


def describe_parity_failure(
    fast: Callable[[], Greedy], plain: Callable[[Tensor], Tensor], *, dtype: torch.dtype
) -> str | None:
    """Return a description of the first difference between ``fast`` and ``plain``, or None.

    ``plain`` returns the model's own log-probabilities (N, T, V) along the tokens that ``fast``
    chose, so that a near tie that the model would decide differently does not change later tokens.
    """
    try:
        greedy = fast()
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"DeepSpeed's layers fail ({type(error).__name__}: {error})"
    plain_NTV = plain(greedy.ids_NT)
    allowed_NT = TOLERANCES[dtype] * plain_NTV.std(dim=-1)
    likeliest_NT = plain_NTV.max(dim=-1)
    of_token_NT = plain_NTV.gather(-1, greedy.ids_NT[..., None]).squeeze(-1)
    # Test for agreement and negate it below, so that NaN counts as a difference.
    same_token_NT = likeliest_NT.values - of_token_NT <= allowed_NT
    same_logprob_NT = (greedy.logprobs_NT - of_token_NT).abs() <= allowed_NT
    wrong = (~(same_token_NT & same_logprob_NT)).T.nonzero()
    if not len(wrong):
        return None
    token, row = wrong[0].tolist()
    place = f"at token {token} of response {row}"
    if not same_token_NT[row, token]:
        return (
            f"{place} greedy decoding takes {greedy.ids_NT[row, token]}, but the model's own "
            f"layers take {likeliest_NT.indices[row, token]}"
        )
    return (
        f"{place} the log-probability of {greedy.ids_NT[row, token]} is "
        f"{greedy.logprobs_NT[row, token]:.4f}, but {of_token_NT[row, token]:.4f} by the model's "
        f"own layers; the largest allowed difference is {allowed_NT[row, token]:.4f}"
    )
