"""Reasons to doubt a run, one by one, and none for a healthy run."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlhf.report.alarms import find_doubts
from tests.needs_lab import needs_lab

HEALTHY: dict[str, dict[str, Any]] = {
    "reward": {"accuracy": 0.805, "accuracy_ci": [0.78, 0.83]},
    "ppo": {
        "response_tokens_before": 8.0,
        "response_tokens_after": 7.0,
        "ended_share_after": 1.0,
        "kl_to_reference": 1.5,
        "score_before": 0.1,
        "score_after": 1.2,
        "score_gain_ci": [0.9, 1.3],
        "gold_before": 0.5,
        "gold_after": 0.8,
        "gold_gain_ci": [0.25, 0.35],
    },
}
UNMOVED = {  # the judge's and the score's intervals include 0
    "score_after": 0.15,
    "score_gain_ci": [-0.1, 0.2],
    "gold_after": 0.5,
    "gold_gain_ci": [-0.1, 0.1],
}
NO_GOLD = {"gold_gain_ci": None}
FELL = {"gold_after": 0.4, "gold_gain_ci": [-0.15, -0.05]}


def doubt_lines(*args: Any) -> list[str]:
    """Return the lines of the doubts, in their order."""
    return [doubt.line for doubt in find_doubts(*args)]


@pytest.mark.parametrize("phases", [HEALTHY, {}, {"sft": {"perplexity_after": 2.0}}])
def test_a_healthy_run_has_none(phases: dict[str, dict[str, Any]]) -> None:
    assert doubt_lines(phases, {}) == []


@needs_lab
@pytest.mark.parametrize(
    ("phase", "changes", "words"),
    [
        ("reward", {"accuracy_ci": [0.373, 0.724]}, ["0.373 to 0.724", "chance", "reward.lr"]),
        ("reward", {"accuracy_ci": [0.5, 0.6]}, ["includes chance"]),
        ("ppo", {"bias_onsets": {"evil": 8}}, ["rewards.evil", "on purpose from step 8"]),
        ("reward", {"accuracy_ci": [0.676, 1.0]}, ["0.676 to 1.000", "data.eval_share"]),
        ("reward", {"accuracy": 0.995, "accuracy_ci": [0.9, 1.0]}, ["0.995", "length alone"]),
        ("ppo", NO_GOLD | {"judge_gains": {"right": [-0.1, 0.2]}}, ["judge right did not measur"]),
        ("ppo", {"gold_gain_ci": [-0.1, 0.2]}, ["gold score did not measurably", "ppo.kl_ctl"]),
        ("ppo", {"gold_gain_ci": [0.0, 0.0]}, ["gold score did not measurably", "ppo.steps"]),
        ("ppo", {"response_tokens_before": 31.0}, ["from 31.0 to 7.0 tokens", "samples.jsonl"]),
        ("ppo", {"response_tokens_after": 17.0}, ["from 8.0 to 17.0 tokens"]),
        ("ppo", {"ended_share_after": 0.19}, ["19% of the responses ended", "max_response_tokens"]),
        ("ppo", {"kl_to_reference": 2.8}, ["0.40 nats per response token", "ppo.kl_ctl"]),
        ("ppo", FELL, ["score rose while gold score fell", "ppo.steps", "reward model"]),
        ("ppo", {"judge_gains": {"exact": [-0.2, -0.1]}}, ["while judge exact fell"]),
        ("ppo", FELL | {"score_parts_after": {}}, ["gold score fell", "correct the parts of `rew"]),
    ],
)
def test_a_doubt_names_the_number_and_a_way_out(
    phase: str, changes: dict[str, Any], words: list[str]
) -> None:
    measures = {key: each for key, each in (HEALTHY[phase] | changes).items() if each is not None}
    (line,) = doubt_lines(HEALTHY | {phase: measures}, {})
    assert line.startswith(f"{phase}: ")
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    ("score", "gold"),
    [
        ([-0.048, 0.332], [-0.2, -0.1]),
        ([0.1, 0.3], None),  # one prompt: no interval
        (None, [-0.2, -0.1]),
    ],
)
def test_a_fall_of_gold_is_claimed_only_if_the_intervals_tell_it(
    score: list[float] | None, gold: list[float] | None
) -> None:
    ppo = HEALTHY["ppo"] | {"gold_after": HEALTHY["ppo"]["gold_before"]}
    ppo |= {"score_gain_ci": score, "gold_gain_ci": gold}
    ppo = {name: value for name, value in ppo.items() if value is not None}
    assert doubt_lines({"ppo": ppo}, {}) == []


def test_far_from_a_clumsy_expert_is_no_doubt_in_an_environment_that_is_mastered() -> None:
    played = HEALTHY["ppo"] | {"kl_to_reference": 2.8, "return_after": 1.0}
    assert doubt_lines({"ppo": played}, {}) == []
    (line,) = doubt_lines({"ppo": played | {"score_gain_ci": [-0.1, 0.3]}}, {})
    assert "0.40 nats" in line


@pytest.mark.parametrize(
    ("kl", "clipped", "words", "remedy"),
    [
        (0.02, 0.001, ["hardly moved", "0.020 nats, 0.1% of the tokens", "actor_lr"], "faster"),
        (-0.02, 0.1, ["ppo.kl_ctl=0.28", "at -0.02 nats", "only +0.050", "lower"], "freer"),
        (1.5, 0.1, ["ppo.kl_ctl=0.28", "at 1.50 nats", "lower ppo.kl_ctl"], "freer"),
        (0.15, 0.1, ["the policy moved", "0.15 nats", "ppo.eval_prompts"], "more_steps"),
        (2.8, 0.1, ["0.40 nats per response token", "raise ppo.kl_ctl"], "closer"),
    ],
)
def test_a_run_that_gained_nothing_is_doubted_with_its_likely_cause(
    kl: float, clipped: float, words: list[str], remedy: str
) -> None:
    ppo = HEALTHY["ppo"] | UNMOVED | {"kl_to_reference": kl}
    series = {"ppo/clipfrac": [(1, clipped)], "ppo/kl_ctl": [(1, 0.28)]}
    (doubt,) = find_doubts({"ppo": ppo}, series)
    assert [word for word in words if word not in doubt.line] == []
    assert doubt.remedy == remedy
    flat = {"ppo/score_std": FLAT, "ppo/score_mean": ONES}
    assert "same score" in doubt_lines({"ppo": ppo}, series | flat)[-1], "equal rewards come first"


FLAT = [(step, 0.0) for step in (1, 2, 3)]
ONES = [(step, 1.0) for step in (1, 2, 3)]
NOT_RISEN = HEALTHY["ppo"] | {"score_gain_ci": [-0.1, 0.1]}


@pytest.mark.parametrize(
    ("series", "words"),
    [
        ({"ppo/score_std": FLAT, "ppo/score_mean": ONES}, "in 3 of 3 steps all responses had"),
        (
            {"ppo/score_std": ONES, "ppo/clipped_score_std": FLAT, "ppo/clipped_score_mean": ONES},
            "in 3 of 3 steps all scores were equal after clipping",
        ),
        ({"ppo/score_std": ONES, "ppo/equal_group_share": ONES}, "100% of the prompts got"),
    ],
)
def test_equal_scores_are_doubted_unless_the_score_has_risen(
    series: dict[str, list[tuple[int, float]]], words: str
) -> None:
    (line,) = doubt_lines({"ppo": NOT_RISEN}, series)
    assert words in line
    (also,) = doubt_lines({"ppo": HEALTHY["ppo"]}, series)
    assert also == line, "equal from the first step: no reward raised the score"
    solved = {name: [(1, 1 - points[0][1]), *points[1:]] for name, points in series.items()}
    assert doubt_lines({"ppo": HEALTHY["ppo"]}, solved) == []


def test_a_reward_that_fails_is_doubted_even_if_the_score_rose() -> None:
    def doubts(share: float) -> list[str]:
        return doubt_lines({"ppo": HEALTHY["ppo"]}, {"ppo/fallback_share": [(1, share)]})

    (line,) = doubts(0.3)
    assert "30% of the responses in training" in line
    assert doubts(0.01) == []


def test_dpo_is_doubted_as_reward_model_and_policy() -> None:
    measures = {"accuracy_ci": [0.4, 0.6], "response_tokens_before": 9.0}
    measures |= {"response_tokens_after": 1.0, "kl_to_reference": 0.05}
    begun = [line[9:23] for line in doubt_lines({"dpo": measures}, {})]
    assert begun == ["95 % interval ", "mean response ", "policy hardly "]


def test_advice_for_dpo_names_keys_that_dpo_reads() -> None:
    measures = {"accuracy_ci": [0.6, 0.7], "response_tokens_before": 9.0, "gold_gain_ci": [-3, -1]}
    measures |= {"response_tokens_after": 9.0, "kl_to_reference": 9.0, "ended_share_after": 0.1}
    text = " ".join(doubt_lines({"dpo": measures | {"score_gain_ci": [1.0, 2.0]}}, {}))
    assert "ppo." not in text
    assert {"dpo.beta", "dpo.lr", "dpo.epochs"} <= set(re.findall(r"dpo\.\w+", text))
