"""List all answers of a tiny task, so that expectations over them are sums.

Shapes: A = answers, T = tokens of an answer, P = prefixes, V = vocabulary, Q = prompts, G = groups
of K answers to a prompt, B = rows: the answers of all groups. A policy is a table of logits (P, V):
any distribution over the answers has such a table. Tables may have more dimensions in front.
"""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from torch import Tensor

LETTERS = 4
MAX_TOKENS = 3


class AnswerTable(NamedTuple):
    """All answers of at most T tokens with the end token, which is the last of the V tokens."""

    tokens_AT: Tensor
    prefix_AT: Tensor  # row of the logits from which the token is drawn
    keep_AT: Tensor  # False after the end token
    letters: int

    @property
    def ended_A(self) -> Tensor:
        """Return True for the answers with an end token, False for answers cut at T tokens."""
        return ((self.tokens_AT == self.letters) & self.keep_AT).any(dim=1)

    @property
    def logits_shape(self) -> tuple[int, int]:
        """Return the shape (P, V) of a policy's logits."""
        return int(self.prefix_AT.max()) + 1, self.letters + 1


def enumerate_answers(letters: int = LETTERS, max_tokens: int = MAX_TOKENS) -> AnswerTable:
    """Return every answer once: answers with an end token, and answers cut at ``max_tokens``."""
    rows: list[list[tuple[int, int]]] = []

    def extend(row: list[tuple[int, int]], prefix: int) -> None:
        for token in range(letters + 1):
            longer = [*row, (token, prefix)]
            if token == letters or len(longer) == max_tokens:
                rows.append(longer)
            else:
                extend(longer, prefix * letters + token + 1)  # prefix 0 is empty

    extend([], 0)
    padded = [row + [(letters, 0)] * (max_tokens - len(row)) for row in rows]
    tokens_AT, prefix_AT = torch.tensor(padded).unbind(dim=-1)
    lengths_A1 = torch.tensor([[len(row)] for row in rows])
    return AnswerTable(tokens_AT, prefix_AT, torch.arange(max_tokens) < lengths_A1, letters)


def draw_logits(generator: torch.Generator, answers: AnswerTable, *prompts: int) -> Tensor:
    """Draw the logits (..., P, V) of random policies from a normal distribution, in fp64."""
    shape = (*prompts, *answers.logits_shape)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def answer_logprobs(logits_PV: Tensor, answers: AnswerTable) -> Tensor:
    """Return the log-probability (..., A, T) of every token, 0 after the end of an answer."""
    taken_AT = logits_PV.log_softmax(dim=-1)[..., answers.prefix_AT, answers.tokens_AT]
    return taken_AT.masked_fill(~answers.keep_AT, 0.0)


class WeightedRows(NamedTuple):
    """Answers to prompts as rows of a batch; the answers of a group are adjacent."""

    prompt_B: Tensor
    answer_B: Tensor
    weights_B: Tensor  # probability of the row's group, times a factor that makes the mean 1


def enumerate_groups(answer_logs_QA: Tensor, size: int) -> WeightedRows:
    """Return all groups of ``size`` answers to each prompt, weighted by their probabilities.

    Groups that differ only in their order are one group. All prompts are equally likely.
    """
    num_prompts, num_answers = answer_logs_QA.shape
    groups_GK = torch.tensor(list(combinations_with_replacement(range(num_answers), size)))
    counts_GA = torch.nn.functional.one_hot(groups_GK, num_answers).sum(dim=1).double()
    orders_G = math.lgamma(size + 1) - torch.lgamma(counts_GA + 1).sum(dim=1)
    weights_QG = (orders_G + answer_logs_QA[:, groups_GK].sum(dim=2)).exp() * len(groups_GK)
    return WeightedRows(
        torch.arange(num_prompts).repeat_interleave(groups_GK.numel()),
        groups_GK.flatten().repeat(num_prompts),
        weights_QG.flatten().repeat_interleave(size),
    )


def draw_groups(
    answer_logs_QA: Tensor, size: int, *, groups: int, generator: torch.Generator
) -> WeightedRows:
    """Draw ``groups`` prompts at random, and sample a group of ``size`` answers to each."""
    prompt_B = torch.randint(len(answer_logs_QA), (groups,), generator=generator)
    prompt_B = prompt_B.repeat_interleave(size)
    answer_B1 = torch.multinomial(answer_logs_QA.exp()[prompt_B], 1, generator=generator)
    return WeightedRows(prompt_B, answer_B1[:, 0], torch.ones(len(prompt_B), dtype=torch.float64))
