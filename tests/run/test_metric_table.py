"""The list of metrics, its page, and its gate."""

import pytest

from rlhf.run.console import KEY_METRICS
from rlhf.run.metric_table import (
    GROUPS,
    METRICS,
    better_direction,
    describe_undocumented_metric,
    varies_between_runs,
)
from rlhf.run.phase_state import BestStep
from tests.needs_lab import needs_lab

UNITS = ("tflops", "mfu")


def test_each_name_stands_once() -> None:
    assert sum(len(group) for group in GROUPS.values()) == len(METRICS)


def test_each_metric_says_everything() -> None:
    for name, info in METRICS.items():
        assert all(text and isinstance(text, str) for text in info[:4]), name
        if info.healthy_range is not None:
            low, high = info.healthy_range
            assert low < high, name
        assert describe_undocumented_metric(name) is None


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("ppo/clip_frac", "ppo/clipfrac"),
        ("loss/sft", "sft/loss"),
        ("policy/approxkl_avg", "ppo/approx_kl"),
    ],
)
def test_an_unknown_name_has_no_direction_and_a_nearest_name(wrong: str, nearest: str) -> None:
    known = f"{wrong} is in no metrics.yaml; the nearest documented metric is {nearest}"
    assert describe_undocumented_metric(wrong) == known
    assert better_direction(wrong) is None


@needs_lab
def test_timings_are_what_depends_on_the_machine() -> None:
    timings = {
        "sft/tokens_per_second",
        "reward/pairs_per_second",
        "dpo/pairs_per_second",
        "reward/responses_per_second",
        "memory/peak_gib",
        *(f"time/{part}_seconds" for part in ("generate", "score", "train", "step")),
        "time/critic_check_seconds",
        "speed/tokens_per_second",
        *(f"speed/{part}_{unit}" for part in ("generate", "score", "train") for unit in UNITS),
    }
    difference = sorted({name for name in METRICS if varies_between_runs(name)} ^ timings)
    assert not difference, "varies_between_runs and this list have different names"


def test_the_terminal_shows_metrics_that_exist_and_at_most_five() -> None:
    for metrics in KEY_METRICS.values():
        assert {metric.name for metric in metrics} <= set(METRICS)
        assert len(metrics) <= 5


@needs_lab
@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("reward/eval_calibration_error", 2),
        ("reward/eval_disagreement", 2),
        ("ppo/eval_episode/truncated", 2),
        ("ppo/eval_episode/failures/timeout", 2),
        ("sft/eval_perplexity", 2),
        ("ppo/eval_kl", 2),
        ("ppo/eval_score", 1),
        ("ppo/eval_parts/brief", 1),
    ],
)
def test_the_table_says_which_step_was_best(name: str, step: int) -> None:
    best = BestStep(name, None, better_direction(name) == "lower")
    for number, value in enumerate([0.30, 0.05, 0.20], start=1):
        best.update({name: value}, number)
    assert best.step == step


def test_held_out_metrics_without_a_direction_are_these() -> None:
    lengths = {"ppo/eval_response_tokens", "ppo/eval_episode/turns"}
    lengths |= {"ppo/eval_episode/observation_tokens"}
    scores = {"reward/eval_chosen_score", "reward/eval_rejected_score"}
    held_out = {name for name in METRICS if "/eval_" in name}
    assert {name for name in held_out if better_direction(name) is None} == lengths | scores
    assert {METRICS[name].better for name in METRICS} == {"higher", "lower", None}
