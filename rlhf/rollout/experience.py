"""From responses to a rollout: what each model thinks of them.

Shapes: B = sequences, P = prompt tokens, T = response tokens, S = P + T, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.logprobs import TokenLogprobs, token_logprobs
from rlhf.algorithms.masking import position_ids
from rlhf.algorithms.reward import end_scores
from rlhf.types import Model, PromptBatch, Responses, Rollout, SequenceBatch, take_rows


class WholeSequences:
    """Prompts and responses joined, as the models read them."""

    def __init__(self, prompts: PromptBatch, responses: Responses) -> None:
        self.ids_BS = torch.cat([prompts.ids_BP, responses.ids_BT], dim=1)
        self.attend_BS = torch.cat([prompts.attend_BP, responses.keep_BT], dim=1)
        self.positions_BS = position_ids(self.attend_BS)
        self.response_tokens = responses.ids_BT.shape[1]

    @property
    def response_ids_BT(self) -> Tensor:
        """The response tokens, padding included."""
        return self.ids_BS[:, -self.response_tokens :]

    def of_response(self, x_BS: Tensor) -> Tensor:
        """What stands (B, T) at the position before each response token, where it is predicted."""
        return x_BS[:, -self.response_tokens - 1 : -1]


def language_logits(model: Model, batch: SequenceBatch) -> Tensor:
    """Logits (B, S, V) of whole sequences under a causal language model."""
    logits_BSV: Tensor = model(
        input_ids=batch.ids_BS,
        attention_mask=batch.attend_BS.long(),
        position_ids=position_ids(batch.attend_BS),
        use_cache=False,
    ).logits
    return logits_BSV


def response_logprobs(
    actor: Model, sequences: WholeSequences, *, temperature: float, entropy_gradient: bool = False
) -> TokenLogprobs:
    """Log-probabilities (B, T) and entropies of the response tokens under ``actor``.

    Token t is predicted at the position before it, so the logits run from the last prompt token to
    the last but one response token.
    """
    logits_BUV = actor(
        input_ids=sequences.ids_BS,
        attention_mask=sequences.attend_BS.long(),
        position_ids=sequences.positions_BS,
        logits_to_keep=sequences.response_tokens + 1,
        use_cache=False,
    ).logits
    return token_logprobs(
        logits_BUV[:, :-1],
        sequences.response_ids_BT,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
    )


def response_values(critic: Model, sequences: WholeSequences) -> Tensor:
    """Values (B, T) before each response token is chosen."""
    values_BS = critic(sequences.ids_BS, sequences.attend_BS, sequences.positions_BS)
    return sequences.of_response(values_BS)


def sequence_scores(reward: Model, sequences: WholeSequences) -> Tensor:
    """Scores (B,) of whole sequences, read at their last tokens."""
    values_BS = reward(sequences.ids_BS, sequences.attend_BS, sequences.positions_BS)
    return end_scores(values_BS, sequences.attend_BS)


class Opinions(NamedTuple):
    """What the models of a run think of response tokens; 0 where there is no such model."""

    logprobs_BT: Tensor
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
    """Ask for ``opinions`` of the responses, ``micro_batch_size`` rows at a time."""
    parts = [
        opinions(WholeSequences(take_rows(prompts, rows), take_rows(responses, rows)))
        for rows in row_parts(len(prompts.texts), micro_batch_size)
    ]
    return Rollout(prompts, responses, *(torch.cat(each) for each in zip(*parts, strict=True)))


def row_parts(num_rows: int, size: int) -> list[list[int]]:
    """Row numbers, ``size`` at a time."""
    return [list(range(i, min(i + size, num_rows))) for i in range(0, num_rows, size)]
