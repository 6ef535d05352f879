"""Metrics of a PPO step, which merge over micro-batches, updates and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.kl import estimate_kl
from rlhf.base.metrics import Maximum, Mean, Metrics, Minimum, Moments
from rlhf.base.types import PromptBatch, Responses, Rollout, StepReport
from rlhf.config.roles import Role
from rlhf.config.schema.ppo import PpoConfig
from rlhf.phases.ppo.options.rollout_logprobs import correction_metrics
from rlhf.phases.ppo.targets import Targets
from rlhf.phases.shared.episode_measures import episode_values
from rlhf.phases.shared.scoring import kl_per_sequence

ROUNDING = 1e-6  # scores that differ by less are the same score; relative to scores above 1


class PpoStats(NamedTuple):
    """Result of one PPO step; losses are means per response token over all its updates."""

    actor_loss: float
    critic_loss: float
    metrics: dict[str, float]

    @classmethod
    def from_metrics(cls, values: dict[str, float]) -> PpoStats:
        """Return the result with these metrics; the loss of a model without training is 0."""
        return cls(values.get("ppo/actor_loss", 0.0), values.get("ppo/critic_loss", 0.0), values)


def rollout_metrics(
    rollout: Rollout, targets: Targets, part_names: Iterable[str] = (), *, has_critic: bool
) -> Metrics:
    """Return metrics of a rollout of B responses of T tokens, before any update."""
    keep_BT = rollout.responses.keep_BT
    kl_BT = estimate_kl(rollout.logprobs_BT, rollout.reference_logprobs_BT, estimator="k1")
    metrics: Metrics = {
        "ppo/score": Moments.of(rollout.scores_B),
        "ppo/clipped_score": Moments.of(targets.clipped_scores_GR),
        "ppo/reward": Moments.of(targets.rewards_BT.sum(dim=1)),
        "ppo/returns": Moments.of(targets.raw.returns_BT, keep_BT),
        "ppo/advantages": Moments.of(targets.raw.advantages_BT, keep_BT),
        "ppo/returns_min": Minimum.of(targets.raw.returns_BT, keep_BT),
        "ppo/returns_max": Maximum.of(targets.raw.returns_BT, keep_BT),
        "ppo/kl_to_reference": Mean.of(kl_per_sequence(rollout)),
        "ppo/kl_to_reference_k3": Mean.of(kl_per_sequence(rollout, estimator="k3")),
        "ppo/kl_per_token": Mean.of(kl_BT, keep_BT),
        "ppo/response_tokens": Mean.of(keep_BT.sum(dim=1)),
        "ppo/ended_share": Mean.of(rollout.responses.ended_B.float()),
        "ppo/duplicate_share": Mean.of(duplicate_mask(rollout.prompts, rollout.responses).float()),
    }
    if targets.clipped_scores_GR.shape[1] > 1:
        equal_G = equal_group_mask(targets.clipped_scores_GR)
        metrics["ppo/equal_group_share"] = Mean.of(equal_G.float())
    if has_critic:
        errors_BT = targets.raw.returns_BT - rollout.values_BT
        metrics["ppo/values"] = Moments.of(rollout.values_BT, keep_BT)
        metrics["ppo/values_min"] = Minimum.of(rollout.values_BT, keep_BT)
        metrics["ppo/values_max"] = Maximum.of(rollout.values_BT, keep_BT)
        metrics["value_errors"] = Moments.of(errors_BT, keep_BT)
    if rollout.parts is not None:
        for name, scores_B in zip(part_names, rollout.parts.scores_BK.unbind(1), strict=True):
            metrics[f"ppo/parts/{name}"] = Mean.of(scores_B)
        metrics["ppo/fallback_share"] = Mean.of(rollout.parts.failed_BK.any(dim=1).float())
    if rollout.disagreement_B is not None:
        metrics["ppo/disagreement"] = Mean.of(rollout.disagreement_B)
    for name, values_B in episode_values(rollout.responses).items():
        metrics[f"ppo/episode/{name}"] = Mean.of(values_B)
    if rollout.replaced_B is not None:
        metrics["ppo/replaced_share"] = Mean.of(rollout.replaced_B)
    if targets.weights is not None:
        metrics |= correction_metrics(targets.weights, keep_BT)
    return metrics


def equal_group_mask(scores_GR: Tensor) -> Tensor:
    """Return a mask (G,), True for a group of R responses that have the same score."""
    spread_G = scores_GR.amax(dim=1) - scores_GR.amin(dim=1)
    return spread_G <= ROUNDING * scores_GR.abs().amax(dim=1).clamp_min(1.0)


def duplicate_mask(prompts: PromptBatch, responses: Responses) -> Tensor:
    """Return a mask (B,), True for a response that another prompt of the batch got too."""
    prompt_B = _label_equal_rows(prompts.ids_BP.masked_fill(~prompts.attend_BP.bool(), -1))
    response_B = _label_equal_rows(responses.ids_BT.masked_fill(~responses.keep_BT, -1))
    answers_A2 = torch.unique(torch.stack([response_B, prompt_B], dim=1), dim=0)  # A: pairs
    num_prompts_R = torch.bincount(answers_A2[:, 0])  # R: distinct responses
    return num_prompts_R[response_B] > 1


def _label_equal_rows(rows_BX: Tensor) -> Tensor:
    """Return a number per row; equal rows have equal numbers."""
    _, numbers_B = torch.unique(rows_BX, dim=0, return_inverse=True)
    assert isinstance(numbers_B, Tensor)
    return numbers_B


def step_values_to_log(metrics: Metrics, updates: list[dict[Role, StepReport]]) -> dict[str, float]:
    """Return the numbers to log for one PPO step, from its merged metrics and optimizer steps."""
    return _to_floats(metrics) | _optimizer_step_values(updates)


def _optimizer_step_values(updates: list[dict[Role, StepReport]]) -> dict[str, float]:
    """Return metrics of the optimizer steps, which are equal on every rank without reduction."""
    steps = {
        role: [update[role] for update in updates if role in update]
        for role in (Role.actor, Role.critic)
    }
    values: dict[str, float] = {
        "ppo/updates": len(updates),
        "ppo/skipped_steps": sum(step.is_skipped for taken in steps.values() for step in taken),
    }
    for role, taken in steps.items():
        values[f"ppo/{role}_overflows"] = sum(step.has_overflowed for step in taken)
        if taken:
            values[f"ppo/{role}_learning_rate"] = taken[-1].learning_rate
            values[f"ppo/{role}_grad_norm"] = sum(step.grad_norm for step in taken) / len(taken)
    return values


def _to_floats(metrics: Metrics) -> dict[str, float]:
    """Return merged metrics as floats; ``Moments`` become a mean and a standard deviation."""
    values = {name: m.value() for name, m in metrics.items() if not isinstance(m, Moments)}
    moments = {name: m for name, m in metrics.items() if isinstance(m, Moments)}
    errors = moments.pop("value_errors", None)
    if errors is not None:
        values["ppo/value_error"] = errors.mean_square.item()
        total = moments["ppo/returns"].variance
        values["ppo/explained_variance"] = float(1 - errors.variance / total) if total > 0 else 0.0
    if (weights := moments.pop("rollout_weights", None)) is not None:
        squares = weights.mean_square.clamp(min=1e-300)  # 0 if every token was rejected
        values["ppo/rollout_sample_size"] = (weights.mean.square() / squares).item()
    for name, moment in moments.items():
        values[f"{name}_mean"], values[f"{name}_std"] = moment.value(), moment.std()
    return values


def trained_roles(values: Mapping[str, float]) -> list[Role]:
    """Return which of actor and critic took optimizer steps in a PPO step with these metrics."""
    return [role for role in (Role.actor, Role.critic) if f"ppo/{role}_learning_rate" in values]


def num_optimizer_steps(values: Mapping[str, float]) -> float:
    """Return the number of optimizer steps of all models in a PPO step with these metrics."""
    return values["ppo/updates"] * len(trained_roles(values))


def update_moving_average(average: float | None, value: float, *, beta: float = 0.9) -> float:
    """Return the exponential ``average`` updated with ``value``; it starts at the first value.

    Values that are not finite are skipped.
    """
    if average is None or not math.isfinite(average):
        return value
    return beta * average + (1 - beta) * value if math.isfinite(value) else average


def early_end_reason(config: PpoConfig, values: Mapping[str, float]) -> str | None:
    """Return why PPO should end after a step with these metrics; None to continue."""
    limit, kl = config.stop_run_kl, values["ppo/kl_to_reference"]
    if limit is None or kl <= limit:
        return None
    return f"ppo/kl_to_reference={kl:.3g} is above ppo.stop_run_kl={limit:g}"
