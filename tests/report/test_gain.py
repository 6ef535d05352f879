"""One judge of a run's success, for its page, the list of runs and the next commands."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlhf.report.gain import read_gain

EXACT = {"exact_before": 0.25, "exact_after": 0.5, "exact_gain_ci": [0.2, 0.3]}
GOLD = {"gold_before": 0.3, "gold_after": 0.2, "gold_gain_ci": [-0.2, -0.1]}
OWN = {"judge_gains": {"polite": [-0.1, 0.2]}}
OWN |= {f"score_parts_{when}": {"polite": 0.4, "paid": 9.0} for when in ("before", "after")}
SCORE = {"score_before": 0.0, "score_after": 1.5, "score_gain_ci": [1.0, 2.0]}
UNCHANGED = {"exact_before": 0.0, "exact_after": 0.0, "exact_gain_ci": [0.0, 0.0]}
UNMOVED = {"exact_before": 0.051, "exact_after": 0.039, "exact_gain_ci": [-0.046, 0.024]}
RISEN_GOLD = GOLD | {"gold_gain_ci": [0.1, 0.2]}
ROSE = "the score rose from 0.000 to 1.500"
BOUGHT = "score, by the reward that PPO maximises"


@pytest.mark.parametrize(
    ("phases", "told"),
    [
        ({"ppo": SCORE | OWN | GOLD | EXACT}, ("exactly right", "better", "+20.0 to +30.0 points")),
        ({"ppo": SCORE | UNCHANGED}, ("exactly right", "no change for any prompt", "")),
        ({"ppo": SCORE | OWN | GOLD}, ("gold score", "worse", "-0.200 to -0.100")),
        ({"ppo": SCORE | OWN}, ("judge polite", "no measurable change", "-0.100 to +0.200")),
        ({"ppo": SCORE}, (BOUGHT, "higher", "+1.000 to +2.000")),
        (
            {"sft": {"perplexity_before": 9.0}, "dpo": GOLD},
            ("gold score", "worse", "-0.200 to -0.1"),
        ),
        (
            {"ppo": SCORE | {"score_gain_ci": [math.nan] * 2}},
            (BOUGHT, "no measurable change", "+nan"),
        ),
        ({"ppo": SCORE | {"score_gain_ci": [1.5] * 2}}, (BOUGHT, "no interval", "")),
        ({"ppo": {"score_before": 1.0, "score_after": 2.0}}, (BOUGHT, "no interval", "")),
        ({"ppo": SCORE | GOLD | {"gold_gain_ci": [None] * 2}}, ("gold score", "no interval", "")),
    ],
)
def test_the_best_judge_tells_the_gain(phases: dict[str, Any], told: tuple[str, str, str]) -> None:
    gain = read_gain(phases)
    assert gain is not None
    assert (gain.judge, gain.word) == told[:2]
    assert gain.interval_text.startswith(told[2])
    assert gain.interval_text or not told[2]
    assert gain.is_proven == (gain.word in {"better", "higher"})


@pytest.mark.parametrize(
    ("judges", "text"),
    [
        (UNMOVED, f"over-optimised? {ROSE}, exactly right did not: 5.1% → 3.9%"),
        (UNMOVED | GOLD, f"over-optimised? {ROSE}, exactly right did not: 5.1% → 3.9%"),
        (GOLD, f"over-optimised: {ROSE}, gold score fell: 0.300 → 0.200"),
        (OWN, f"over-optimised? {ROSE}, judge polite did not: 0.400 → 0.400"),
        (UNMOVED | RISEN_GOLD, "no measurable change: exactly right 5.1% → 3.9%"),
        (UNMOVED | {"score_gain_ci": [-0.1, 2.0]}, "no measurable change: exactly right 5.1% → "),
        ({}, "higher: score"),
    ],
)
def test_a_score_that_rises_alone_is_told_first(judges: dict[str, Any], text: str) -> None:
    gain = read_gain({"ppo": SCORE | judges})
    assert gain is not None
    assert gain.text.startswith(text)


def test_ends_are_those_of_the_judge_and_phases_without_a_policy_have_none() -> None:
    gain = read_gain({"ppo": SCORE | OWN})
    assert gain is not None
    assert gain.value_texts == ("0.400", "0.400"), "of its own part"
    assert read_gain({"sft": {"perplexity_before": 9.0}, "reward": {"accuracy": 0.9}}) is None
