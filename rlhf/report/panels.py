"""The most important charts of each phase for a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Panel(NamedTuple):
    """A chart: its title, its metrics, and a label per metric if there are several."""

    title: str
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()


# The most important curves of each phase, in the order of the page.
PANELS: Mapping[str, Sequence[Panel]] = {
    "PPO: reward": (
        Panel("Score", ("ppo/score_mean", "ppo/eval_score"), ("rollouts", "held-out")),
        Panel("Gold score", ("ppo/eval_gold", "ppo/eval_exact"), ("gold", "exactly right")),
        Panel("Reward after the KL penalty", ("ppo/reward_mean",)),
        Panel(
            "Deviation of scores",
            ("ppo/score_std", "ppo/clipped_score_std"),
            ("as scored", "clipped"),
        ),
        Panel("Prompts with equal scores", ("ppo/equal_group_share",)),
        Panel("Responses with a fallback", ("ppo/fallback_share",)),
        Panel("Disagreement of the reward model's members", ("ppo/disagreement",)),
    ),
    "PPO: health": (
        Panel(
            "Clip fraction",
            ("ppo/clipfrac", "ppo/value_clipfrac", "ppo/dual_clipfrac"),
            ("policy", "values", "dual"),
        ),
        Panel(
            "Ratio of new and old policy", ("ppo/ratio_mean", "ppo/ratio_max"), ("mean", "largest")
        ),
        Panel(
            "KL to the reference",
            ("ppo/kl_to_reference", "ppo/eval_kl"),
            ("rollouts", "held-out"),
        ),
        Panel("KL to the reference per token", ("ppo/kl_per_token",)),
        Panel("KL of an update", ("ppo/approx_kl",)),
        Panel("Entropy", ("ppo/entropy",)),
        Panel(
            "Explained variance",
            ("ppo/explained_variance", "ppo/critic_explained_variance"),
            ("of returns", "of true values"),
        ),
        Panel("Slope of true values over values", ("ppo/critic_slope",)),
        Panel("Values and returns", ("ppo/values_mean", "ppo/returns_mean"), ("values", "returns")),
        Panel("Critic's loss", ("ppo/critic_loss",)),
    ),
    "PPO: rollouts": (
        Panel("Response length", ("ppo/response_tokens",)),
        Panel("Share that ended", ("ppo/ended_share",)),
        Panel("Share of duplicates", ("ppo/duplicate_share",)),
        Panel("Log-prob mismatch of rollout and training", ("ppo/logprob_mismatch",)),
        Panel("Tokens with a large mismatch", ("ppo/logprob_mismatch_share",)),
        Panel("Weight of tokens for that mismatch", ("ppo/rollout_weight",)),
        Panel("Speed", ("speed/tokens_per_second",)),
    ),
    "PPO: episodes": (
        Panel(
            "Return and successes",
            ("ppo/episode/return", "ppo/episode/success", "ppo/eval_episode/success"),
            ("return", "successes", "held-out successes"),
        ),
        Panel("Turns", ("ppo/episode/turns", "ppo/eval_episode/turns"), ("rollouts", "held-out")),
        Panel("Episodes that were cut", ("ppo/episode/truncated",)),
    ),
    "PPO: time and memory": (
        Panel(
            "Seconds of a step",
            ("time/generate_seconds", "time/score_seconds", "time/train_seconds"),
            ("generate", "score", "train"),
        ),
        Panel("Peak memory", ("memory/peak_gib",)),
        Panel(
            "Share of the peak rate (MFU)",
            ("speed/generate_mfu", "speed/score_mfu", "speed/train_mfu"),
            ("generate", "score", "train"),
        ),
    ),
    "DPO": (
        Panel("Loss", ("dpo/loss", "dpo/eval_loss"), ("batch", "held-out")),
        Panel("Accuracy", ("dpo/accuracy", "dpo/eval_accuracy"), ("batch", "held-out")),
        Panel("Margin", ("dpo/margin",)),
    ),
    "Reward model": (
        Panel("Loss", ("reward/loss", "reward/eval_loss"), ("batch", "held-out")),
        Panel("Accuracy", ("reward/accuracy", "reward/eval_accuracy"), ("batch", "held-out")),
        Panel(
            "Accuracy on pairs with a single flaw",
            (
                "reward/eval_one_item_wrong",
                "reward/eval_one_item_too_many",
                "reward/eval_one_item_missing",
            ),
            ("one item wrong", "one too many", "one missing"),
        ),
        Panel("Margin", ("reward/margin",)),
        Panel("Calibration error", ("reward/eval_calibration_error",)),
        Panel("Disagreement of the members", ("reward/eval_disagreement",)),
    ),
    "SFT": (
        Panel("Loss", ("sft/loss", "sft/eval_loss"), ("batch", "held-out")),
        Panel("Learning rate", ("sft/learning_rate",)),
        Panel("Gradient norm", ("sft/grad_norm",)),
    ),
}


def panels_of(names: Iterable[str]) -> dict[str, Sequence[Panel]]:
    """Return ``PANELS``, with further panels for parts of rewards among the metrics ``names``."""
    panels = dict(PANELS)
    for prefix, title in (
        ("ppo/parts/", "Parts of the score"),
        ("ppo/eval_parts/", "Parts, held-out"),
    ):
        parts = tuple(name for name in names if name.startswith(prefix))
        if parts:
            panel = Panel(title, parts, tuple(name.removeprefix(prefix) for name in parts))
            panels["PPO: reward"] = (*panels["PPO: reward"], panel)
    return panels
