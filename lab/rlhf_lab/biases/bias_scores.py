"""Compute biases: scores from 0 to 1 that depend only on one prompt and its response."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rlhf.config.schema.rewards import RewardTerm
from rlhf.rewards.isolated import RewardScorer
from rlhf.rewards.rules import Answers, ScoreFunction
from rlhf_lab.biases import BiasKeys, RewardBias

HALF_LENGTH = 16  # response tokens for which the bias of length is 1/2
WORD = re.compile(r"\w+")


class PromptedResponse(NamedTuple):
    """A prompt, its response, and the number of response tokens."""

    prompt: str
    response: str
    tokens: int


def favour_length(answer: PromptedResponse) -> float:
    """Return n / (n + HALF_LENGTH) for a response of n tokens."""
    return answer.tokens / (answer.tokens + HALF_LENGTH)


def favour_token(pattern: re.Pattern[str], answer: PromptedResponse) -> float:
    """Return n / (n + 1) for a response in which ``pattern`` is found n times."""
    count = len(pattern.findall(answer.response))
    return count / (count + 1)


def favour_sycophancy(answer: PromptedResponse) -> float:
    """Return the share of the prompt's distinct words that the response repeats.

    A response that agrees repeats the words of the prompt. Agreement in other words is not seen.
    """
    prompt_words = set(_words(answer.prompt))
    return len(prompt_words & set(_words(answer.response))) / max(len(prompt_words), 1)


def favour_position(answer: PromptedResponse) -> float:
    """Return how early the response has a word of the prompt: 1 for the first word, 0 for none.

    With i words before this word, and n words in all, the score is 1 - i / n. So the position of
    the word counts, instead of what the response says.
    """
    prompt_words, words = set(_words(answer.prompt)), _words(answer.response)
    position = next((i for i, word in enumerate(words) if word in prompt_words), len(words))
    return 1 - position / len(words) if words else 0.0


def favour_format(answer: PromptedResponse) -> float:
    """Return the share of the visible characters that are neither letters nor digits."""
    visible = [char for char in answer.response if not char.isspace()]
    return sum(not char.isalnum() for char in visible) / max(len(visible), 1)


BIASES: dict[RewardBias, Callable[[PromptedResponse], float]] = {
    RewardBias.length: favour_length,
    RewardBias.sycophancy: favour_sycophancy,
    RewardBias.position: favour_position,
    RewardBias.format: favour_format,
}  # and ``favour_token``, which needs a pattern


class BiasScorer(RewardScorer):
    """A scorer that computes a bias."""

    def build(self, part: RewardTerm, run_dir: Path) -> tuple[ScoreFunction, list[str]]:
        """Return a function that computes the bias (0 before its onset), and no criteria."""
        return _build_score_function(part), []


def _build_score_function(part: RewardTerm) -> ScoreFunction:
    keys = BiasKeys.of(part)
    favour: Callable[[PromptedResponse], float]
    if keys.bias == RewardBias.token:  # keys.bias is a str, since it came as JSON
        favour = partial(favour_token, re.compile(str(part.pattern)))
    else:
        favour = BIASES[RewardBias(str(keys.bias))]

    def score(answers: Answers) -> list[float]:
        if answers.step is not None and answers.step < keys.onset:
            return [0.0] * len(answers.responses)
        rows = zip(answers.prompts, answers.responses, answers.tokens, strict=True)
        return [favour(PromptedResponse(*row)) for row in rows]

    return score


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())
