"""Figures from rows of answers, against values computed by hand."""

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.evaluate.__main__ import compute_statistics
from rlhf.evaluate.figures import (
    RankedRow,
    answer_statistics,
    best_of_k_statistics,
    bootstrap_interval,
    distinct_ngram_ratio,
    estimate_pass_at_k,
    repeated_ngram_share,
    reward_model_statistics,
    share_interval,
    win_rate,
    win_rate_at_equal_length,
    win_rates,
)


def row(prompt: str, score: float, **more: Any) -> dict[str, Any]:
    values = {"model": "a", "sample": 0, "response": "x y", "kl": 1.0, "ended": True, "tokens": 2}
    return values | {"prompt": prompt, "score": score, "right": None} | more


def test_figures_are_means_over_answers() -> None:
    rows = [
        row("p", 1.0, kl=0.5, ended=False, response="one two"),
        row("p", 3.0, sample=1, tokens=6, response="one two"),
        row("q", 5.0, response="three", **{"gold/gold": 1.0}),
    ]
    rows = [each | {"gold/gold": each.get("gold/gold", 0.0)} for each in rows]
    found = answer_statistics(rows)
    assert (found["prompts"], found["answers"], found["score"]) == (2, 3, 3.0)
    assert found["ended_share"] == pytest.approx(2 / 3)
    assert found["tokens"] == pytest.approx(10 / 3)
    assert found["gold/gold"] == pytest.approx(1 / 3)
    assert found["distinct_responses"] == pytest.approx(2 / 3)
    assert found["score_ci"] == [2.0, 5.0], "each prompt counts once: 2 and 5"
    assert "pass_at" not in found


def test_pass_at_k() -> None:
    assert estimate_pass_at_k([True, False, False, False], 1) == 0.25
    assert estimate_pass_at_k([True, False, False, False], 2) == pytest.approx(0.5)
    assert estimate_pass_at_k([True, True, False], 2) == 1.0
    rows = [row("p", 0.0, sample=n, right=n == 0) for n in range(4)]
    assert answer_statistics(rows)["pass_at"] == {"1": 0.25, "2": pytest.approx(0.5), "4": 1.0}


def test_best_of_n_is_the_mean_over_all_choices_by_score() -> None:
    scores = {"p": [0.3, 2.0, -1.0, 0.5], "q": [4.0, 1.0, 2.0, 3.0]}
    golds = {"p": [1.0, 0.2, 0.4, 0.9], "q": [0.7, 0.1, 0.6, 0.3]}
    rows = [
        row(prompt, score, sample=n, **{"gold/gold": golds[prompt][n]})
        for prompt, of_prompt in scores.items()
        for n, score in enumerate(of_prompt)
    ]
    found = answer_statistics(rows)
    for n in (1, 2, 4):
        best = [
            golds[prompt][max(chosen, key=scores[prompt].__getitem__)]
            for prompt in scores
            for chosen in combinations(range(4), n)
        ]
        assert found["best_of"][str(n)] == pytest.approx(sum(best) / len(best))
    assert found["agreement"] == 0.5, "only q's answer of highest score is the best by gold"
    assert "best_of" not in answer_statistics(rows[::4]), "one sample of each prompt"


def test_the_score_is_judged_by_a_part_with_weight_0_too() -> None:
    golds = [0.2, 0.9, 0.4, 0.1]
    rows = [
        row("p", float(n), sample=n, **{"parts/good": gold, "parts/other": -gold})
        for n, gold in enumerate(golds)
    ]
    found = answer_statistics(rows, ["good", "other"])["by_judge"]
    assert found["good"]["best_of"]["4"] == 0.1, "the answer of the highest score"
    assert found["good"]["agreement"] == 0
    assert found["other"]["agreement"] == 1
    assert "by_judge" not in answer_statistics(rows)


@pytest.mark.parametrize(
    ("good", "bad", "credit"),
    [
        ([2], [1, 0, -1], 1),
        ([1], [2, 0, 0], 0),
        ([2], [2, 0, 0], 1 / 2),
        ([2], [2, 2, 2], 1 / 4),
        ([3, 1], [2, 0], 1),
        ([2, 2], [2, 1], 2 / 3),
        ([1, 0], [2], 0),
    ],
)
def test_the_best_of_k_has_the_credit_of_a_draw_among_equal_scores(
    good: list[float], bad: list[float], credit: float
) -> None:
    rows = [RankedRow("all", "", good, bad), RankedRow("other", "", [1], [0])]
    found = best_of_k_statistics(rows)
    assert found["all"]["accuracy"] == pytest.approx(credit)
    assert found["all"]["chance"] == pytest.approx(len(good) / len(good + bad))
    assert found["other"]["accuracy"] == 1
    assert "ties_score" not in found["all"]


@pytest.mark.parametrize(
    ("tied", "ref", "score"),
    [
        # 0.3 for each accuracy, 0.2 if the gap exceeds the spread, and 0.2 if ref's gap does too.
        (([4, 3], [1]), ([5], [2]), 1 + 0.01 * math.tanh(2 / 1 - 1)),
        (([4, 3], [1]), ([5], [4.5]), 0.8 + 0.01 * math.tanh(0.5 / 1 - 1)),
        (([4, 1], [0]), ([5], [2]), 0.6 + 0.01 * math.tanh(1 / 3 - 1)),
        (([4, 1], [2]), ([5], [2]), 0.3 + 0.01 * math.tanh(-1 / 3 - 1)),
        (([4, 1], [2]), ([1], [2]), 0.01 * math.tanh(-1 / 3 - 1)),
        (([3, 3], [1]), ([5], [2]), 1.01),  # no spread
    ],
)
def test_ties_are_scored_as_in_rewardbench_2(tied: Any, ref: Any, score: float) -> None:
    rows = [RankedRow("Ties", "tied:7", *tied), RankedRow("Ties", "ref:7", *ref)]
    assert best_of_k_statistics(rows)["Ties"]["ties_score"] == pytest.approx(score)
    lonely = RankedRow("Ties", "ref:8", [1], [0])  # without a tied prompt it counts as accurate
    more = best_of_k_statistics([*rows, lonely])["Ties"]["ties_score"]
    assert more == pytest.approx(score + (0 if ref[0] > ref[1] else 0.15))


def test_win_rates_compare_answers_to_the_same_prompt() -> None:
    mine = [row("p", 2.0, model="b"), row("q", 1.0, model="b"), row("r", 0.0, model="b")]
    theirs = [row("p", 1.0), row("q", 1.0), row("r", 3.0), row("alone", 9.0)]
    found = win_rate([*mine, *theirs], "b", "a")
    assert (found["prompts"], found["rate"]) == (3, 0.5)
    assert found["controlled"] == 0.5, "all answers are equally long"
    pairs = win_rates([*mine, *theirs], ["a", "b"])
    assert [(each["model"], each["against"]) for each in pairs] == [("b", "a")]


def test_length_control_takes_away_what_length_wins() -> None:
    # The longer answer wins four of five; the model's answers are longer in three of four.
    lengths = [10.0] * 150 + [-10.0] * 50
    rates = [1.0] * 120 + [0.0] * 30 + [1.0] * 10 + [0.0] * 40
    assert np.mean(rates) == 0.65
    assert win_rate_at_equal_length(rates, lengths) == pytest.approx(0.5, abs=0.01)
    # Better answers win whatever their length.
    rates = [1.0, 1.0, 1.0, 0.0] * 50
    lengths = [10.0] * 100 + [-10.0] * 100
    assert win_rate_at_equal_length(rates, lengths) == pytest.approx(0.75, abs=0.01)


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    random = np.random.default_rng(1)
    covered = [
        low <= 0.3 <= high
        for low, high in (bootstrap_interval(list(random.random(60) < 0.3)) for _ in range(200))
    ]
    assert 0.9 < np.mean(covered) < 0.99


def test_a_share_at_its_end_is_no_certainty() -> None:
    """Wilson's interval of 10 of 10 begins at 10 / (10 + 1.96^2)."""
    ours, theirs = (
        [row(str(n), x, right=True, model=m) for n in range(10)]
        for x, m in ((1.0, "a"), (0.0, "b"))
    )
    ranked = [RankedRow("s", str(n), [2.0], [1.0]) for n in range(10)]
    shares = [
        answer_statistics(ours)["score_ci"],
        answer_statistics(ours)["right_ci"],
        win_rate([*ours, *theirs], "a", "b")["ci"],
        best_of_k_statistics(ranked)["s"]["accuracy_ci"],
        reward_model_statistics([1.0] * 10)["accuracy_ci"],
    ]
    assert shares == [pytest.approx([10 / (10 + 1.96**2), 1.0])] * 5
    assert sum(share_interval([0.5] * 3)) == pytest.approx(1.0), "a share may be of several answers"
    graded = answer_statistics([row(str(n), 0.5 + n / 100) for n in range(10)])["score_ci"]
    assert graded == pytest.approx([0.53, 0.56], abs=0.01), "scores between 0 and 1 are no shares"


def test_diversity_and_repetition() -> None:
    assert (
        distinct_ngram_ratio([row("p", 0.0, response="a b a"), row("q", 0.0, response="a")], 1)
        == 0.5
    )
    assert distinct_ngram_ratio([row("p", 0.0, response="a b a b")], 2) == pytest.approx(2 / 3)
    assert distinct_ngram_ratio([row("p", 0.0, response="")], 1) == 0.0
    assert repeated_ngram_share("a b c d a b c d") == pytest.approx(1 / 5)
    assert repeated_ngram_share("too short") == 0.0


def test_calibration_of_a_reward_model() -> None:
    # Always certain by 1.0, and right in nine of ten pairs.
    found = reward_model_statistics([1.0] * 9 + [-1.0], bins=1)
    (only,) = found["calibration"]
    assert found["accuracy"] == 0.9
    assert only == {"certainty": pytest.approx(0.731, abs=1e-3), "right": 0.9, "pairs": 10}
    assert found["calibration_error"] == pytest.approx(0.169, abs=1e-3)
    # In bins of equal width, as in result.json: one of ten is certain by 0.99 and wrong.
    found = reward_model_statistics([0.1] * 9 + [-5.0], bins=1)
    expected = 0.9 * (1 - 1 / (1 + math.exp(-0.1))) + 0.1 / (1 + math.exp(-5))
    assert found["calibration_error"] == pytest.approx(expected)


def test_values_of_a_diverged_policy_are_counted_as_nan(tmp_path: Path) -> None:
    row = {"model": "ppo", "decoder": "sampled", "prompt": "a", "response": "b", "sample": 0}
    row |= {"score": 0.5, "kl": None, "tokens": 2, "ended": True, "right": None}
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation/answers.jsonl").write_text(json.dumps(row) + "\n")
    figures = compute_statistics(tmp_path, {})["models"]["ppo"]["decoders"]["sampled"]
    assert math.isnan(figures["kl"])
    assert figures["score"] == 0.5
    assert "pass_at" not in figures, "no answer is known to be right or wrong"
