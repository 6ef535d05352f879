"""A task so small that all its answers are listed, and expectations over them are sums.

Shapes: A = answers, T = tokens of an answer, P = prefixes, V = vocabulary. A policy is a table of
logits (P, V): any distribution over the answers has such a table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.rollout.sampling import SamplingSettings, draw_tokens

LETTERS = 4
END = LETTERS  # the end token
MAX_TOKENS = 3
PREFIXES = sum(LETTERS**length for length in range(MAX_TOKENS))
SAMPLING = SamplingSettings(max_tokens=MAX_TOKENS, temperature=1.0, top_k=0, top_p=1.0)


class Answers(NamedTuple):
    """All answers of at most ``MAX_TOKENS`` tokens, the end token included."""

    tokens_AT: Tensor
    prefix_AT: Tensor  # row of the logits from which the token is drawn
    keep_AT: Tensor  # False after the end token


def enumerate_answers() -> Answers:
    """Return every answer once: those with an end token, and those that the limit cuts."""
    rows: list[list[tuple[int, int]]] = []

    def extend(row: list[tuple[int, int]], prefix: int) -> None:
        for token in range(LETTERS + 1):
            longer = [*row, (token, prefix)]
            if token == END or len(longer) == MAX_TOKENS:
                rows.append(longer)
            else:
                extend(longer, next_prefix(prefix, token))

    extend([], 0)
    padded = [row + [(END, 0)] * (MAX_TOKENS - len(row)) for row in rows]
    tokens_AT, prefix_AT = torch.tensor(padded).unbind(dim=-1)
    lengths_A1 = torch.tensor([[len(row)] for row in rows])
    return Answers(tokens_AT, prefix_AT, torch.arange(MAX_TOKENS) < lengths_A1)


def next_prefix(prefix: int, token: int) -> int:
    """Return the number of the prefix that is ``token`` longer; prefix 0 is empty."""
    return prefix * LETTERS + token + 1


def draw_logits(generator: torch.Generator, *, scale: float = 1.0) -> Tensor:
    """Return the normally distributed logits (P, V) of a random policy, in fp64."""
    shape = (PREFIXES, LETTERS + 1)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def token_logprobs(logits_PV: Tensor, answers: Answers) -> Tensor:
    """Return the log-probability (A, T) of every token, 0 after the end of an answer."""
    taken_AT = logits_PV.log_softmax(dim=1)[answers.prefix_AT, answers.tokens_AT]
    return taken_AT.masked_fill(~answers.keep_AT, 0.0)


def sample_answers(
    logits_PV: Tensor, answers: Answers, count: int, generator: torch.Generator
) -> Tensor:
    """Draw ``count`` answers token by token with the rollout's sampler; return their rows in A."""
    tokens_NT = torch.full((count, MAX_TOKENS), END)
    prefix_N = torch.zeros(count, dtype=torch.long)
    is_open_N = torch.ones(count, dtype=torch.bool)
    for t in range(MAX_TOKENS):
        draws_N = torch.rand(count, generator=generator)
        drawn_N = draw_tokens(logits_PV[prefix_N].float(), draws_N, SAMPLING).tokens_B
        tokens_NT[:, t] = drawn_N.where(is_open_N, END)
        is_open_N &= drawn_N != END
        prefix_N = (prefix_N * LETTERS + drawn_N + 1).where(is_open_N, 0)
    place_T = (LETTERS + 1) ** torch.arange(MAX_TOKENS)
    codes_A = (answers.tokens_AT * place_T).sum(dim=1)
    row_of_code = torch.full(((LETTERS + 1) ** MAX_TOKENS,), -1)
    row_of_code[codes_A] = torch.arange(len(codes_A))
    rows_N: Tensor = row_of_code[(tokens_NT * place_T).sum(dim=1)]
    return rows_N
