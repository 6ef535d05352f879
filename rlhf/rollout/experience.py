"""From responses to a rollout: what each model thinks of them.

Shapes: B = sequences, P = prompt tokens, T = response tokens, S = tokens of the longest sequence,
N = kept response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from rlhf.algorithms.logprobs import Picks, Reading, TokenLogprobs
from rlhf.types import Judge, Model, PromptBatch, Responses, Rollout, SequenceBatch, take_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ResponseLogprobs(NamedTuple):
    """What a policy thinks of response tokens; 0 where none is kept."""

    logprobs_BT: Tensor
    entropy_BT: Tensor | None


class WholeSequences:
    """Prompts and responses joined and padded on the right, as the models read them."""

    def __init__(self, prompts: PromptBatch, responses: Responses) -> None:
        self.prompts, self.responses = prompts, responses
        attend = torch.cat([prompts.attend_BP, responses.keep_BT], dim=1)
        self.lengths_B = attend.sum(dim=1)
        # Sorting is stable: the tokens keep their order, and the padding goes behind them.
        order_BS = attend.byte().argsort(dim=1, descending=True, stable=True)
        order_BS = order_BS[:, : int(self.lengths_B.max())]
        self.ids_BS = torch.cat([prompts.ids_BP, responses.ids_BT], dim=1).gather(1, order_BS)
        self.keep_BT = responses.keep_BT
        rows_N, places_N = self.keep_BT.nonzero(as_tuple=True)
        before_BT = prompts.attend_BP.sum(dim=1, keepdim=True) + self.keep_BT.cumsum(dim=1) - 2
        ids_N = responses.ids_BT[rows_N, places_N]
        self.picks = Picks(rows_N, before_BT[rows_N, places_N], ids_N)

    def of_response(self, x_N: Tensor) -> Tensor:
        """What belongs to the kept response tokens, at their places (B, T); 0 elsewhere."""
        return x_N.new_zeros(self.keep_BT.shape).masked_scatter(self.keep_BT, x_N)

    def before_response(self, x_BS: Tensor) -> Tensor:
        """What stands (B, T) at the position before each response token, where it is predicted."""
        return self.of_response(x_BS[self.picks.rows_N, self.picks.columns_N])

    def told(self, tokens: TokenLogprobs) -> ResponseLogprobs:
        """What is told of ``picks``, at their places."""
        entropy_N = tokens.entropy_N
        entropy_BT = None if entropy_N is None else self.of_response(entropy_N)
        return ResponseLogprobs(self.of_response(tokens.logprobs_N), entropy_BT)


def language_logprobs(model: Model, batch: SequenceBatch) -> Tensor:
    """Log-probabilities (N,) of the kept tokens that are predicted, row by row."""
    told: TokenLogprobs = model(batch.ids_BS, Picks.of(batch), Reading(with_entropy=False))
    return told.logprobs_N


def response_logprobs(
    actor: Model, sequences: WholeSequences, reading: Reading
) -> ResponseLogprobs:
    """Log-probabilities (B, T) and entropies of the response tokens under ``actor``."""
    return sequences.told(actor(sequences.ids_BS, sequences.picks, reading))


def response_values(critic: Model, sequences: WholeSequences) -> Tensor:
    """Values (B, T) before each response token is chosen."""
    return sequences.before_response(critic(sequences.ids_BS))


class Scores(Protocol):
    """What scores whole responses, in the reward model's place."""

    def __call__(self, sequences: WholeSequences) -> Tensor:
        """Scores (B,)."""


class ModelScores(NamedTuple):
    """Scores of a reward model."""

    model: Model

    def __call__(self, sequences: WholeSequences) -> Tensor:
        """What it reads at the last tokens (B,)."""
        with self.model.evaluating():
            values_BS: Tensor = self.model(sequences.ids_BS)
            return values_BS.gather(1, sequences.lengths_B[:, None] - 1).squeeze(1)


class JudgeScores(NamedTuple):
    """Scores by rule: the gold scores of a judge."""

    judge: Judge
    tokenizer: PreTrainedTokenizerBase

    def __call__(self, sequences: WholeSequences) -> Tensor:
        """The gold scores (B,) of the responses as text."""
        rated = ratings(self.judge, self.tokenizer, sequences.prompts, sequences.responses)
        return torch.tensor([each["gold"] for each in rated], device=sequences.ids_BS.device)


def ratings(
    judge: Judge, tokenizer: PreTrainedTokenizerBase, prompts: PromptBatch, responses: Responses
) -> list[Mapping[str, float]]:
    """Return a judge's ratings of each response."""
    texts, ended = response_texts(tokenizer, responses), responses.ended_B.tolist()
    answers = zip(prompts.texts, texts, ended, strict=True)
    return [judge.rate(prompt, text, ended=has_ended) for prompt, text, has_ended in answers]


def response_texts(tokenizer: PreTrainedTokenizerBase, responses: Responses) -> list[str]:
    """The responses as text, without the end token."""
    return [
        tokenizer.decode(ids_T[keep_T], skip_special_tokens=True)
        for ids_T, keep_T in zip(responses.ids_BT, responses.keep_BT, strict=True)
    ]


class Opinions(NamedTuple):
    """What the models of a run think of response tokens; 0 where there is no such model."""

    logprobs_BT: Tensor | None  # None: the policy was not asked, the rollout's own are taken
    reference_logprobs_BT: Tensor
    values_BT: Tensor
    scores_B: Tensor


def collect(
    opinions: Callable[[WholeSequences], Opinions],
    prompts: PromptBatch,
    responses: Responses,
    *,
    micro_batch_size: int,
) -> Rollout:
    """Ask for ``opinions`` of the responses, ``micro_batch_size`` rows of like length at a time."""
    order = by_length(prompts, responses, list(range(len(prompts.texts))))
    parts = [
        opinions(WholeSequences(take_rows(prompts, rows), take_rows(responses, rows)))
        for rows in row_parts(order, micro_batch_size)
    ]
    place = sorted(range(len(order)), key=order.__getitem__)
    own, *others = zip(*parts, strict=True)
    logprobs_BT = responses.logprobs_BT if own[0] is None else torch.cat(own)[place]
    assert logprobs_BT is not None, "nobody measured the log-probabilities"
    return Rollout(prompts, responses, logprobs_BT, *(torch.cat(each)[place] for each in others))


def by_length(prompts: PromptBatch, responses: Responses, rows: list[int]) -> list[int]:
    """``rows``, the longest first: neighbours are padded least."""
    lengths = (prompts.attend_BP.sum(dim=1) + responses.keep_BT.sum(dim=1)).tolist()
    return sorted(rows, key=lambda row: -lengths[row])


def row_parts(rows: list[int], size: int) -> list[list[int]]:
    """``rows``, ``size`` at a time."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]
