"""The parts of ``rewards`` together: their scores of a batch, and the weighted sum.

Shapes: B = sequences, K = parts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardPart
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.errors import RewardError
from rlhf.phases.shared.scoring import ratings, response_texts
from rlhf.rewards.answers import Answers
from rlhf.rewards.isolated import FailureError, IsolatedReward
from rlhf.types import Judge, PartScores, PromptBatch, Responses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HERE = (RewardKind.model, RewardKind.gold)  # the other kinds have a process of their own


def start_parts(parts: Mapping[str, RewardPart]) -> dict[str, IsolatedReward]:
    """Start the processes of the parts that have one.

    Raises:
        ConfigError: if a part cannot be used.
    """
    return {name: IsolatedReward(name, p) for name, p in parts.items() if p.kind not in HERE}


class RewardMix:
    """A function from responses to the scores of all parts and their weighted sum."""

    def __init__(
        self, parts: Mapping[str, RewardPart], tokenizer: PreTrainedTokenizerBase, judge: Judge
    ) -> None:
        self.parts = parts
        self._tokenizer = tokenizer
        self._judge = judge
        self._isolated = start_parts(parts)

    def __call__(
        self, prompts: PromptBatch, responses: Responses, model_scores_B: Tensor
    ) -> tuple[Tensor, PartScores]:
        """Return the weighted sums (B,) and what they are sums of.

        Raises:
            RewardError: if a part without a fallback failed.
        """
        texts = response_texts(self._tokenizer, responses) if self._isolated else []
        for isolated in self._isolated.values():  # all compute while the first is waited for
            isolated.ask(_answers(prompts, responses, texts, isolated.part))
        columns: list[Tensor] = []
        for name, part in self.parts.items():
            match part.kind:
                case RewardKind.model:
                    columns.append(model_scores_B)
                case RewardKind.gold:
                    rated = ratings(self._judge, self._tokenizer, prompts, responses)
                    columns.append(model_scores_B.new_tensor([each["gold"] for each in rated]))
                case _:
                    columns.append(model_scores_B.new_tensor(self._scores_of(name)))
        scores_BK = torch.stack(columns, dim=1)
        failed_BK = scores_BK.isnan()
        fallbacks_K = scores_BK.new_tensor([part.fallback or 0.0 for part in self.parts.values()])
        scores_BK = torch.where(failed_BK, fallbacks_K, scores_BK)
        return weighted(self.parts, scores_BK), PartScores(scores_BK, failed_BK)

    def close(self) -> None:
        """End the processes of the parts."""
        for isolated in self._isolated.values():
            isolated.close()

    def _scores_of(self, name: str) -> list[float]:
        """Return the scores of a part with a process; NaN where its fallback is to be used."""
        isolated, fallback = self._isolated[name], self.parts[name].fallback
        try:
            found = isolated.scores()
            problem = "it returned NaN or infinity" if any(map(math.isnan, found)) else None
        except FailureError as error:
            found, problem = [math.nan] * isolated.rows, str(error)
        if problem is None:
            return found
        if fallback is None:
            raise RewardError(
                f"rewards.{name} (kind={isolated.part.kind}) failed: {problem}. Correct it, or set "
                f"rewards.{name}.fallback=NUMBER, the score of responses that it cannot score"
            )
        logging.getLogger(__name__).warning(
            "warning: rewards.%s failed: %s; used its fallback %g", name, problem, fallback
        )
        return found


def _answers(
    prompts: PromptBatch, responses: Responses, texts: list[str], part: RewardPart
) -> Answers:
    """Return what a part is asked: the ``texts`` of the responses, and the columns that it reads.

    Raises:
        RewardError: if the prompts come without one of these columns.
    """
    rows = prompts.columns or [{}] * len(prompts.texts)
    missing = next((name for name in part.columns for row in rows if name not in row), None)
    if missing is not None:
        raise RewardError(
            f"rewards read the column {missing}, and the prompts come without it; "
            "give RLHFEngine.prompts the columns of each prompt"
        )
    return Answers(
        prompts.texts,
        texts,
        responses.ended_B.tolist(),
        responses.keep_BT.sum(dim=1).tolist(),
        {name: [row[name] for row in rows] for name in part.columns},
    )


def build_mix(
    parts: Mapping[str, RewardPart], tokenizer: PreTrainedTokenizerBase
) -> RewardMix | None:
    """Return the mix of ``parts``; None without any."""
    return RewardMix(parts, tokenizer, GoldJudge()) if parts else None


def weighted(parts: Mapping[str, RewardPart], scores_BK: Tensor) -> Tensor:
    """Return the weighted sums (B,) of the parts' scores."""
    return scores_BK @ scores_BK.new_tensor([part.weight for part in parts.values()])
