"""Parts of the score: their sum, their fallbacks, and what they are asked."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf.base.errors import RewardError
from rlhf.base.types import PromptBatch, Responses
from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.data.records import Record
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.models.tokenizers import train_tokenizer
from rlhf.phases.ppo import reward_mix
from rlhf.phases.ppo.reward_mix import RewardMix, build_reward_mix
from rlhf.rewards.isolated import FailureError
from rlhf.rewards.rules import Answers, PartScores
from tests.phases.ppo.ppo_pieces import engine_config

TOKENIZER = train_tokenizer(["one two three"], vocab_size=260)
TEXTS = ["one", "two three", "three"]


class Fake:
    """A part without a process: its scores, or the error that it raises, are given."""

    def __init__(self, part: RewardTerm, outcome: Any) -> None:
        self.part, self.outcome, self.rows = part, outcome, 0
        self.criteria = ["clear"] if part.kind == RewardKind.judge else []
        self.asked: list[Answers] = []

    def send_answers(self, answers: Answers) -> None:
        self.asked.append(answers)
        self.rows = len(answers.responses)

    def receive_scores(self) -> PartScores:
        if isinstance(self.outcome, FailureError):
            raise self.outcome
        return self.outcome if isinstance(self.outcome, PartScores) else PartScores(self.outcome)

    def close(self) -> None:
        """Have no process to end."""


Mixed = Callable[..., Any]


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Mixed:
    """A mix of fakes, called on three responses whose model scores are 10, 20, 30."""

    def called(
        outcomes: dict[str, Any],
        columns: list[dict[str, Any]] | None = None,
        *,
        model: Sequence[float] = (10.0, 20.0, 30.0),
        times: int = 1,
        **parts: RewardTerm,
    ) -> Any:
        fakes = {name: Fake(parts[name], outcome) for name, outcome in outcomes.items()}
        monkeypatch.setattr(reward_mix, "start_reward_processes", lambda *_: fakes)
        ids = [TOKENIZER.encode(text) for text in TEXTS]
        width = max(map(len, ids))
        ids_BT = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        keep_BT = torch.arange(width)[None] < torch.tensor([len(row) for row in ids])[:, None]
        responses = Responses(ids_BT, keep_BT, torch.tensor([True, False, True]))
        prompts = PromptBatch(ids_BT, keep_BT, torch.zeros(3, 1), ["a", "b", "c"], columns, 7)
        mix = RewardMix(parts, TOKENIZER, GoldJudge(), said.append)
        for _ in range(times):
            found = mix(prompts, responses, torch.tensor(model))
        mix.close()
        return (*found, fakes)

    return called


@pytest.fixture
def said() -> list[str]:
    """What the mix printed on the terminal."""
    return []


def part(kind: RewardKind = RewardKind.function, **keys: Any) -> RewardTerm:
    return RewardTerm(kind=kind, **keys)


def test_the_score_is_the_weighted_sum(mixed: Mixed) -> None:
    total, parts, _ = mixed(
        {"mine": [1.0, 2.0, 4.0]}, learned=part(RewardKind.model, weight=0.5), mine=part(weight=-1)
    )
    assert total.tolist() == [4.0, 8.0, 11.0]
    assert parts.scores_BK.tolist() == [[10, 1], [20, 2], [30, 4]]
    assert not parts.failed_BK.any()


def test_a_part_is_asked_with_its_columns(mixed: Mixed) -> None:
    rows = [{"n": 1, "other": 0}, {"n": 2, "other": 0}, {"n": 3, "other": 0}]
    *_, fakes = mixed({"mine": [0.0] * 3}, rows, mine=part(columns=["n"]))
    (asked,) = fakes["mine"].asked
    assert asked.prompts == ["a", "b", "c"]
    assert asked.responses == TEXTS
    assert asked.ended == [True, False, True]
    assert asked.tokens == [len(TOKENIZER.encode(text)) for text in TEXTS]
    assert (asked.columns, asked.step) == ({"n": [1, 2, 3]}, 7)
    with pytest.raises(RewardError, match="read the column n, but a prompt lacks it"):
        mixed({"mine": [0.0] * 3}, None, mine=part(columns=["n"]))


@pytest.mark.parametrize(
    ("outcome", "failed", "why"),
    [
        (FailureError("it took more than 1 s"), [True, True, True], "it took more than 1 s"),
        ([1.0, float("nan"), 2.0], [False, True, False], "it returned NaN, infinity or a number"),
    ],
)
def test_a_fallback_replaces_what_failed(
    outcome: Any, failed: list[bool], why: str, mixed: Mixed, said: list[str]
) -> None:
    total, parts, _ = mixed({"mine": outcome}, mine=part(fallback=-3, weight=2), times=3)
    assert parts.failed_BK[:, 0].tolist() == failed
    assert [score == -6 for score in total.tolist()] == failed
    first, last = said  # not a line for every batch
    assert first.startswith(f"warning: rewards.mine (kind=function) failed in PPO step 7: {why}")
    assert "get its fallback -3" in first
    count = 3 * sum(failed)
    assert f"rewards.mine failed for {count} of 9 responses" in last
    with pytest.raises(RewardError, match=rf"rewards\.mine \(kind=function\) failed .*: {why}"):
        mixed({"mine": outcome}, mine=part())


NAN = math.nan


@pytest.mark.parametrize(
    ("outcome", "criteria", "why"),
    [
        (PartScores([0.5, NAN, 1], {"clear": [0.25, NAN, 1]}, "a lie"), [0.25, -3, 1], "a lie"),
        (FailureError("its process ended"), [-3, -3, -3], "its process ended"),
    ],
)
def test_criteria_of_a_failed_verdict_get_the_fallback_too(
    outcome: Any, criteria: list[float], why: str, mixed: Mixed, said: list[str]
) -> None:
    judge = part(RewardKind.judge, fallback=-3)
    _, parts, _ = mixed({"mine": outcome}, mine=judge, times=2)
    assert {name: each.tolist() for name, each in parts.criteria.items()} == {
        "mine.clear": criteria
    }
    assert f"rewards.mine (kind=judge) failed in PPO step 7: {why}; responses that" in said[0]
    with pytest.raises(RewardError, match=rf"\(kind=judge\) failed in PPO step 7: {why}\. A part"):
        mixed({"mine": outcome}, mine=part(RewardKind.judge))


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (
            FailureError("ZeroDivisionError (mine.py:3)"),
            "my.jsonl, row 1 and my.jsonl, row 2, .*Zero",
        ),
        ([1.0, float("nan")], "failed on my.jsonl, row 2, before training: it returned NaN"),
        ([1.0, 2.0], None),
    ],
)
def test_parts_are_tried_on_rows_of_the_data(
    outcome: Any, why: str | None, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    rows = [Record("ask", "one two", columns={"n": n}, place=("my.jsonl", n)) for n in (1, 2)]

    def try_parts_on_rows(**keys: Any) -> Fake:
        fake = Fake(part(**keys), outcome)
        monkeypatch.setattr(reward_mix, "start_reward_processes", lambda *_: {"mine": fake})
        parts = {"mine": fake.part, "learned": part(RewardKind.model)}
        mix = RewardMix(parts, TOKENIZER, GoldJudge(), said.append)
        mix.try_parts_on_rows(rows)
        mix.close()
        return fake

    (asked,) = try_parts_on_rows(columns=["n"], fallback=0).asked
    length = len(TOKENIZER.encode("one two"))
    texts = ["one two", "one two"]
    assert asked == (["ask", "ask"], texts, [True, True], [length, length], {"n": [1, 2]}, None)
    assert len(said) == (why is not None), "no count of responses, as there were none"
    if why is not None:
        with pytest.raises(RewardError, match=rf"rewards\.mine .*{why}.*must return one number"):
            try_parts_on_rows()


def test_the_warning_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rewards = {"mine": part(RewardKind.stop, fallback=0)}
    mix = build_reward_mix(replace(engine_config(), rewards=rewards), TOKENIZER)
    mix._raise_or_count_failure(
        "mine", "boom \x1b[31mred\x07 WANDB_API_KEY=abcdefgh1234", 1, "here"
    )
    mix.close()
    printed = "".join(capsys.readouterr())
    assert "WANDB_API_KEY=[redacted]" in printed
    assert not {"\x1b", "\x07"} & set(printed)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e16])
def test_what_the_reward_model_cannot_score_is_no_zero(bad: float, mixed: Mixed) -> None:
    why = r"it returned NaN, infinity.* for 2 responses\. The reward model's weights are damaged or"
    message = rf"^rewards\.learned \(kind=model\) failed in PPO step 7: {why} overflow"
    with pytest.raises(RewardError, match=message):
        mixed({}, learned=part(RewardKind.model), model=[bad, 2.0, bad])
