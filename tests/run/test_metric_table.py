"""The list of metrics, its page, and its gate."""

from __future__ import annotations

import pytest

from rlhf.run.console import KEY_METRICS
from rlhf.run.metric_table import (
    GROUPS,
    METRICS,
    better_direction,
    describe_undocumented,
    is_timing,
)
from rlhf.run.phase_state import BestStep

UNITS = ("tflops", "mfu")

NAMES = {
    "sft": "loss learning_rate grad_norm skipped_steps tokens_per_second eval_loss eval_perplexity",
    "reward": "loss accuracy margin chosen_score rejected_score learning_rate grad_norm "
    "skipped_steps "
    "pairs_per_second eval_accuracy eval_loss eval_chosen_score eval_rejected_score "
    "eval_one_item_wrong eval_one_item_too_many eval_one_item_missing "
    "eval_calibration_error eval_disagreement eval_prompt_variance",
    "ppo": "score_mean score_average score_std clipped_score_mean clipped_score_std "
    "equal_group_share reward_mean reward_std kl_to_reference "
    "kl_to_reference_k3 kl_per_token kl_ctl logprob_mismatch logprob_mismatch_share "
    "logprob_mismatch_max rollout_weight rollout_weight_min "
    "rollout_limited_share rollout_sample_size replaced_share clipfrac approx_kl ratio_mean "
    "ratio_max entropy actor_loss "
    "critic_loss value_clipfrac value_error values_min values_max returns_min returns_max "
    "values_mean values_std returns_mean returns_std advantages_mean advantages_std "
    "explained_variance critic_error critic_bias critic_explained_variance critic_slope "
    "critic_ranking response_tokens ended_share duplicate_share actor_learning_rate "
    "episode/return episode/success episode/turns episode/truncated episode/observation_tokens "
    "episode/failures/NAME eval_episode/return eval_episode/success eval_episode/turns "
    "eval_episode/truncated eval_episode/observation_tokens eval_episode/failures/NAME "
    "critic_learning_rate actor_grad_norm critic_grad_norm skipped_steps eval_score eval_gold "
    "eval_kl disagreement ptx_loss kl_loss dual_clipfrac lr_scale updates actor_overflows "
    "critic_overflows "
    "eval_ended_share eval_response_tokens eval_exact eval_exact_greedy eval_correct eval_polite "
    "eval_stops fallback_share parts/NAME eval_parts/NAME",
    "rollout": "accelerated_layers",
    "dpo": "loss accuracy margin chosen_reward rejected_reward learning_rate grad_norm "
    "skipped_steps "
    "pairs_per_second eval_accuracy eval_loss",
    "time": "generate_seconds score_seconds train_seconds step_seconds critic_check_seconds",
    "speed": "tokens_per_second generate_tflops generate_mfu score_tflops score_mfu train_tflops "
    "train_mfu",
    "memory": "peak_gib",
}


def test_the_names_are_these_and_each_stands_once() -> None:
    expected = {f"{prefix}/{name}" for prefix, names in NAMES.items() for name in names.split()}
    difference = sorted(set(METRICS) ^ expected)
    assert not difference, "metrics.yaml and NAMES of this file have different names"
    assert sum(len(group) for group in GROUPS.values()) == len(expected)


@pytest.mark.parametrize("name", METRICS)
def test_each_metric_says_everything(name: str) -> None:
    info = METRICS[name]
    assert all(text and isinstance(text, str) for text in info[:4])
    if info.healthy_range is not None:
        low, high = info.healthy_range
        assert isinstance(low, float)
        assert isinstance(high, float)
        assert low < high
    assert describe_undocumented(name) is None


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("ppo/clip_frac", "ppo/clipfrac"),
        ("loss/sft", "sft/loss"),
        ("policy/approxkl_avg", "ppo/approx_kl"),
    ],
)
def test_an_unknown_name_has_no_direction_and_a_nearest_name(wrong: str, nearest: str) -> None:
    known = f"{wrong} is not in rlhf/run/metrics.yaml; the nearest metric there is {nearest}"
    assert describe_undocumented(wrong) == known
    assert better_direction(wrong) is None


def test_timings_are_what_depends_on_the_machine() -> None:
    timings = {
        "sft/tokens_per_second",
        "reward/pairs_per_second",
        "dpo/pairs_per_second",
        "memory/peak_gib",
        *(f"time/{part}_seconds" for part in ("generate", "score", "train", "step")),
        "time/critic_check_seconds",
        "speed/tokens_per_second",
        *(f"speed/{part}_{unit}" for part in ("generate", "score", "train") for unit in UNITS),
    }
    difference = sorted({name for name in METRICS if is_timing(name)} ^ timings)
    assert not difference, "is_timing and this list have different names"


def test_the_terminal_shows_metrics_that_exist_and_at_most_five() -> None:
    for metrics in KEY_METRICS.values():
        assert {metric.name for metric in metrics} <= set(METRICS)
        assert len(metrics) <= 5


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
