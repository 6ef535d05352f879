"""Turn responses into a rollout: score them with policy, reference, critic and reward model.

Shapes: B = sequences, P = prompt tokens, T = response tokens, S = tokens of the longest sequence,
N = kept response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlhf.algorithms.kl import KlEstimatorName, estimate_kl
from rlhf.base.errors import RewardError
from rlhf.base.heartbeat import beat
from rlhf.base.types import (
    LogprobOptions,
    PromptBatch,
    Responses,
    Rollout,
    TermScores,
    TokenLogprobs,
    TokenModel,
    TokenPositions,
    ValueModel,
    copy_to_device,
    take_rows,
)
from rlhf.config.schema.keys import LARGEST_SCORE
from rlhf.data.collate import padded_width
from rlhf.data.synthetic_pairs import GoldJudge

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_SCORE = f"it returned NaN, infinity or a number beyond {LARGEST_SCORE:g}"
FIX_MODEL = (
    "The reward model's weights are damaged or overflow: train it with a lower reward.lr, or set "
    "hardware.dtype=fp32"
)


class ResponseLogprobs(NamedTuple):
    """Log-probabilities and entropies of response tokens under a policy; 0 at padding."""

    logprobs_BT: Tensor
    entropy_BT: Tensor | None


class WholeSequences:
    """Prompts and responses joined into right-padded sequences, the models' input."""

    def __init__(self, prompts: PromptBatch, responses: Responses) -> None:
        self.prompts, self.responses = prompts, responses
        attend = torch.cat([prompts.attend_BP, responses.attend_BT], dim=1)
        self.lengths_B = attend.sum(dim=1)
        # A stable sort keeps the order of the tokens and moves the padding behind them.
        order_BS = attend.byte().argsort(dim=1, descending=True, stable=True)
        order_BS = order_BS[:, : padded_width(int(self.lengths_B.max()), max_width=attend.shape[1])]
        self.ids_BS = torch.cat([prompts.ids_BP, responses.ids_BT], dim=1).gather(1, order_BS)
        self.keep_BT = responses.keep_BT
        self._cells = rows_N, places_N = self.keep_BT.nonzero(as_tuple=True)
        attend_BT, prompt_tokens_B1 = responses.attend_BT, prompts.attend_BP.sum(1, keepdim=True)
        before_BT = prompt_tokens_B1 + attend_BT.cumsum(dim=1) - 2
        ids_N = responses.ids_BT[rows_N, places_N]
        self.positions = TokenPositions(rows_N, before_BT[rows_N, places_N], ids_N)

    def scatter(self, x_N: Tensor) -> Tensor:
        """Return (B, T) with one number of ``x_N`` at each kept response token, 0 elsewhere."""
        # The backward pass of masked_scatter would wait for a GPU.
        return x_N.new_zeros(self.keep_BT.shape).index_put(self._cells, x_N)

    def scatter_logprobs(self, tokens: TokenLogprobs) -> ResponseLogprobs:
        """Return log-probabilities and entropies of the kept response tokens as (B, T)."""
        entropy_N = tokens.entropy_N
        entropy_BT = None if entropy_N is None else self.scatter(entropy_N)
        return ResponseLogprobs(self.scatter(tokens.logprobs_N), entropy_BT)

    def select_predicting_positions(self, x_BS: Tensor) -> Tensor:
        """Return (B, T) with ``x_BS`` at the position that predicts each response token."""
        return self.scatter(x_BS[self.positions.rows_N, self.positions.columns_N])

    def last_token_values(self, x_BS: Tensor) -> Tensor:
        """Return the entries (B,) of ``x_BS`` at the last tokens of the sequences."""
        return x_BS.gather(1, self.lengths_B[:, None] - 1).squeeze(1)


def response_logprobs(
    model: TokenModel, sequences: WholeSequences, options: LogprobOptions
) -> ResponseLogprobs:
    """Return log-probabilities (B, T) and entropies of the response tokens under ``model``."""
    return sequences.scatter_logprobs(model(sequences.ids_BS, sequences.positions, options))


def response_values(critic: ValueModel, sequences: WholeSequences) -> Tensor:
    """Return values (B, T) of the states in which each response token is chosen."""
    return sequences.select_predicting_positions(critic(sequences.ids_BS))


class ResponseScores(NamedTuple):
    """Scores of whole responses, and measures (B,) of the scores by name."""

    scores_B: Tensor
    measures: Mapping[str, Tensor] = {}


# A function that scores whole responses, by a reward model or by a judge.
ScoreSequences = Callable[[WholeSequences], ResponseScores]
# A function from prompts, responses and model scores (B,) to weighted sums (B,) and their parts.
RewardFunction = Callable[[PromptBatch, Responses, Tensor], tuple[Tensor, TermScores]]


@runtime_checkable
class ResponseScorer(Protocol):
    """An option's reward model, which returns scores of responses instead of values of tokens."""

    def response_scores(self, sequences: WholeSequences) -> ResponseScores:
        """Return the scores (B,) of the responses, and measures of the scores."""


@dataclass(frozen=True)
class ModelScores:
    """A function that scores responses by a reward model."""

    model: ValueModel

    def __call__(self, sequences: WholeSequences) -> ResponseScores:
        """Return the values at the last tokens, or the scores of a ``ResponseScorer``."""
        with self.model.evaluating() as module:
            if isinstance(module, ResponseScorer):
                return module.response_scores(sequences)
            return ResponseScores(sequences.last_token_values(self.model(sequences.ids_BS)))


def zero_scores(sequences: WholeSequences) -> ResponseScores:
    """Return zeros, for a run in which no model scores the responses."""
    return ResponseScores(torch.zeros(len(sequences.ids_BS), device=sequences.ids_BS.device))


@dataclass(frozen=True)
class JudgeScores:
    """A function that scores responses by a judge, which computes gold scores by a rule."""

    judge: GoldJudge
    tokenizer: PreTrainedTokenizerBase

    def __call__(self, sequences: WholeSequences) -> ResponseScores:
        """Return the gold scores of the decoded responses."""
        rated = rate_responses(self.judge, self.tokenizer, sequences.prompts, sequences.responses)
        scores = [each["gold"] for each in rated]
        return ResponseScores(torch.tensor(scores, device=sequences.ids_BS.device))


def rate_responses(
    judge: GoldJudge, tokenizer: PreTrainedTokenizerBase, prompts: PromptBatch, responses: Responses
) -> list[Mapping[str, float]]:
    """Return a judge's ratings of each response, by the names of its criteria."""
    texts, ended = response_texts(tokenizer, responses), responses.ended_B.tolist()
    answers = zip(prompts.texts, texts, ended, strict=True)
    return [judge.rate(prompt, text, ended=has_ended) for prompt, text, has_ended in answers]


def response_texts(tokenizer: PreTrainedTokenizerBase, responses: Responses) -> list[str]:
    """Return the responses as text, without the end token."""
    return [
        tokenizer.decode(ids_T[keep_T], skip_special_tokens=True)
        for ids_T, keep_T in zip(responses.ids_BT, responses.keep_BT, strict=True)
    ]


class ModelOutputs(NamedTuple):
    """Outputs of all models for the same responses; 0 for a model that the run does not have."""

    logprobs_BT: Tensor | None  # None: use the log-probabilities of the rollout backend
    reference_logprobs_BT: Tensor
    values_BT: Tensor
    last_values_B: Tensor  # the critic's values after the last tokens
    scores_B: Tensor
    measures: Mapping[str, Tensor] = {}  # measures of the scores, by name


class ScoringModels(Protocol):
    """The models and the reward function that score the responses of a run."""

    @property
    def rewards(self) -> RewardFunction | None:
        """Return the function that sums several rewards; None to use the model's scores."""

    def score(self, sequences: WholeSequences, *, with_policy: bool = True) -> ModelOutputs:
        """Run all models without gradients and dropout; the policy only if ``with_policy``."""


def score_responses(
    models: ScoringModels,
    prompts: PromptBatch,
    responses: Responses,
    *,
    micro_batch_size: int,
    with_policy: bool = True,
) -> Rollout:
    """Return the rollout of ``responses``, scored ``micro_batch_size`` rows at a time.

    Rows of similar length are scored together. Without ``with_policy`` the rollout keeps the
    log-probabilities that the rollout backend measured while it sampled.

    Raises:
        RewardError: if a score is NaN, infinite or too large for the statistics.
    """
    order = sort_rows_by_length(prompts, responses, list(range(len(prompts.texts))))
    # Joining sequences waits for a GPU, so all are joined before the first model runs.
    micro_batches = [
        WholeSequences(take_rows(prompts, rows), take_rows(responses, rows))
        for rows in split_rows(order, micro_batch_size)
    ]
    outputs = []
    for sequences in micro_batches:
        beat()
        outputs.append(models.score(sequences, with_policy=with_policy))
    index_B = copy_to_device(torch.tensor(order).argsort(), responses.ids_BT.device)
    policy, *others, measures = zip(*outputs, strict=True)
    logprobs_BT = torch.cat(policy)[index_B] if with_policy else responses.logprobs_BT
    assert logprobs_BT is not None, "the rollout backend measured no log-probabilities"
    reference_BT, values_BT, last_values_B, scores_B = (torch.cat(each)[index_B] for each in others)
    parts = None
    if models.rewards is not None:
        scores_B, parts = models.rewards(prompts, responses, scores_B)
    if count := count_failed_scores(scores_B):
        what, fix = "the reward model", FIX_MODEL
        if parts is not None:
            what, fix = "the weighted sum of rewards", "Lower rewards.NAME.weight"
        raise RewardError(
            f"{what} failed {describe_step(prompts)}: {NO_SCORE} for {count} responses. {fix}"
        )
    return Rollout(
        prompts,
        responses,
        logprobs_BT,
        reference_BT,
        values_BT,
        scores_B,
        parts=parts,
        last_values_B=last_values_B,
        reuses_logprobs=not with_policy,
        measures={n: torch.cat([each[n] for each in measures])[index_B] for n in measures[0]},
    )


def valid_score_mask(scores: Tensor) -> Tensor:
    """Return a mask, True for each score that is finite and small enough to be squared."""
    return scores.abs() <= LARGEST_SCORE  # False for NaN


def count_failed_scores(scores_B: Tensor) -> int:
    """Return the number of scores that are NaN, infinite or too large."""
    return int((~valid_score_mask(scores_B)).sum())


def describe_step(prompts: PromptBatch) -> str:
    """Return words for a message: the PPO step of ``prompts``, or that they are held out."""
    return "on held-out prompts" if prompts.step is None else f"in PPO step {prompts.step}"


def sequence_lengths(prompts: PromptBatch, responses: Responses) -> list[int]:
    """Return the number of tokens of each row's prompt and response together."""
    lengths_B = prompts.attend_BP.sum(dim=1) + responses.attend_BT.sum(dim=1)
    return [int(length) for length in lengths_B.tolist()]


def sort_rows_by_length(prompts: PromptBatch, responses: Responses, rows: list[int]) -> list[int]:
    """Return ``rows`` with the longest sequences first, so that neighbours need little padding."""
    lengths = sequence_lengths(prompts, responses)
    return sorted(rows, key=lambda row: -lengths[row])


def split_rows(rows: list[int], size: int) -> list[list[int]]:
    """Split ``rows`` into lists of ``size`` rows; the last list may be shorter."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def kl_per_sequence(rollout: Rollout, *, estimator: KlEstimatorName = "k1") -> Tensor:
    """Return KL(policy || reference) of each response (B,), in nats."""
    kl_BT = estimate_kl(rollout.logprobs_BT, rollout.reference_logprobs_BT, estimator=estimator)
    return kl_BT.masked_fill(~rollout.responses.keep_BT, 0.0).sum(dim=1)
