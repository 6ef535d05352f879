"""Parts of the score: their sum, their fallbacks, and what they are asked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardPart
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.errors import RewardError
from rlhf.models.tokenizers import train_tokenizer
from rlhf.phases.shared import reward_mix
from rlhf.phases.shared.reward_mix import RewardMix
from rlhf.rewards.answers import Answers
from rlhf.rewards.isolated import FailureError
from rlhf.types import PromptBatch, Responses

TOKENIZER = train_tokenizer(["one two three"], vocab_size=260)
TEXTS = ["one", "two three", "three"]
Mix = Callable[..., RewardMix]


class Fake:
    """A part without a process: its scores, or the error that it raises, are given."""

    def __init__(self, part: RewardPart, outcome: list[float] | FailureError) -> None:
        self.part, self.outcome, self.rows = part, outcome, 0
        self.asked: list[Answers] = []

    def ask(self, answers: Answers) -> None:
        self.asked.append(answers)
        self.rows = len(answers.responses)

    def scores(self) -> list[float]:
        if isinstance(self.outcome, FailureError):
            raise self.outcome
        return self.outcome


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A mix of fakes, called on three responses whose model scores are 10, 20, 30."""

    def called(
        outcomes: dict[str, Any], columns: list[dict[str, Any]] | None = None, **parts: RewardPart
    ) -> Any:
        fakes = {name: Fake(parts[name], outcome) for name, outcome in outcomes.items()}
        monkeypatch.setattr(reward_mix, "start_parts", lambda _: fakes)
        ids = [TOKENIZER.encode(text) for text in TEXTS]
        width = max(map(len, ids))
        ids_BT = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        keep_BT = torch.arange(width)[None] < torch.tensor([len(row) for row in ids])[:, None]
        responses = Responses(ids_BT, keep_BT, torch.tensor([True, False, True]))
        prompts = PromptBatch(ids_BT, keep_BT, torch.zeros(3, 1), ["a", "b", "c"], columns)
        mix = RewardMix(parts, TOKENIZER, GoldJudge())
        return (*mix(prompts, responses, torch.tensor([10.0, 20.0, 30.0])), fakes)

    return called


def part(kind: RewardKind = RewardKind.function, **keys: Any) -> RewardPart:
    return RewardPart(kind=kind, **keys)


def test_the_score_is_the_weighted_sum(mixed: Callable[..., Any]) -> None:
    total, parts, _ = mixed(
        {"mine": [1.0, 2.0, 4.0]}, learned=part(RewardKind.model, weight=0.5), mine=part(weight=-1)
    )
    assert total.tolist() == [4.0, 8.0, 11.0]
    assert parts.scores_BK.tolist() == [[10, 1], [20, 2], [30, 4]]
    assert not parts.failed_BK.any()


def test_a_part_is_asked_with_its_columns(mixed: Callable[..., Any]) -> None:
    rows = [{"n": 1, "other": 0}, {"n": 2, "other": 0}, {"n": 3, "other": 0}]
    *_, fakes = mixed({"mine": [0.0] * 3}, rows, mine=part(columns=["n"]))
    (asked,) = fakes["mine"].asked
    assert asked.prompts == ["a", "b", "c"]
    assert asked.responses == TEXTS
    assert asked.ended == [True, False, True]
    assert asked.tokens == [len(TOKENIZER.encode(text)) for text in TEXTS]
    assert asked.columns == {"n": [1, 2, 3]}
    with pytest.raises(RewardError, match="read the column n, and the prompts come without it"):
        mixed({"mine": [0.0] * 3}, None, mine=part(columns=["n"]))


@pytest.mark.parametrize(
    ("outcome", "failed", "why"),
    [
        (FailureError("it took more than 1 s"), [True, True, True], "it took more than 1 s"),
        ([1.0, float("nan"), 2.0], [False, True, False], "it returned NaN or infinity"),
    ],
)
def test_a_fallback_replaces_what_failed(
    outcome: Any,
    failed: list[bool],
    why: str,
    mixed: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        total, parts, _ = mixed({"mine": outcome}, mine=part(fallback=-3, weight=2))
    assert parts.failed_BK[:, 0].tolist() == failed
    assert [score == -6 for score in total.tolist()] == failed
    assert f"rewards.mine failed: {why}; used its fallback -3" in caplog.text
    with pytest.raises(RewardError, match=rf"rewards\.mine \(kind=function\) failed: {why}"):
        mixed({"mine": outcome}, mine=part())
