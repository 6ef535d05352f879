"""What a rollout and its updates tell, as metrics that merge over micro-batches and ranks."""

from __future__ import annotations

from torch import Tensor

from rlhf.algorithms.kl import KlEstimatorName, kl_estimate
from rlhf.algorithms.ppo import PolicyLoss, ValueLoss
from rlhf.metrics import Maximum, Mean, Metrics, Minimum, Moments
from rlhf.phases.ppo_models import Reports
from rlhf.phases.ppo_targets import Targets
from rlhf.types import Rollout, StepReport


def rollout_metrics(rollout: Rollout, targets: Targets, *, has_critic: bool) -> Metrics:
    """Metrics of a rollout of B responses of T tokens, before anything is learned from it."""
    keep_BT = rollout.responses.keep_BT
    kl_BT = kl_estimate(rollout.logprobs_BT, rollout.reference_logprobs_BT, estimator="k1")
    metrics: Metrics = {
        "ppo/score": Moments.of(rollout.scores_B),
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
    }
    if has_critic:
        errors_BT = targets.raw.returns_BT - rollout.values_BT
        metrics["ppo/values"] = Moments.of(rollout.values_BT, keep_BT)
        metrics["ppo/values_min"] = Minimum.of(rollout.values_BT, keep_BT)
        metrics["ppo/values_max"] = Maximum.of(rollout.values_BT, keep_BT)
        metrics["value_errors"] = Moments.of(errors_BT, keep_BT)
    return metrics


def kl_per_sequence(rollout: Rollout, *, estimator: KlEstimatorName = "k1") -> Tensor:
    """KL(policy || reference) of each response (B,), in nats."""
    kl_BT = kl_estimate(rollout.logprobs_BT, rollout.reference_logprobs_BT, estimator=estimator)
    return kl_BT.masked_fill(~rollout.responses.keep_BT, 0.0).sum(dim=1)


def policy_metrics(loss: PolicyLoss, entropy: Mean) -> Metrics:
    """The actor's metrics of one micro-batch of updates."""
    return {
        "ppo/actor_loss": loss.actor_loss,
        "ppo/clipfrac": loss.clipfrac,
        "ppo/dual_clipfrac": loss.dual_clipfrac,
        "ppo/approx_kl": loss.approx_kl,
        "ppo/ratio_mean": loss.ratio_mean,
        "ppo/ratio_max": loss.ratio_max,
        "ppo/entropy": entropy,
    }


def critic_metrics(loss: ValueLoss) -> Metrics:
    """The critic's metrics of one micro-batch of updates."""
    return {"ppo/critic_loss": loss.critic_loss, "ppo/value_clipfrac": loss.clipfrac}


def report_values(reports: list[Reports]) -> dict[str, float]:
    """Numbers to log of the optimiser steps of one PPO step; the same on every rank."""
    steps = {
        "actor": [r.actor for r in reports if r.actor is not None],
        "critic": [r.critic for r in reports if r.critic is not None],
    }
    values: dict[str, float] = {
        "ppo/updates": len(reports),
        "ppo/skipped_steps": sum(s.is_skipped for each in steps.values() for s in each),
        "ppo/actor_overflows": sum(r.actor_overflowed for r in reports),
        "ppo/critic_overflows": sum(r.critic_overflowed for r in reports),
    }
    for model, taken in steps.items():
        if taken:
            values[f"ppo/{model}_learning_rate"] = taken[-1].learning_rate
            values[f"ppo/{model}_grad_norm"] = _mean_norm(taken)
    return values


def _mean_norm(steps: list[StepReport]) -> float:
    return sum(step.grad_norm for step in steps) / len(steps)


def printed(metrics: Metrics) -> dict[str, float]:
    """Numbers to log of merged metrics: moments become a mean and a deviation."""
    values = {name: m.value() for name, m in metrics.items() if not isinstance(m, Moments)}
    moments = {name: m for name, m in metrics.items() if isinstance(m, Moments)}
    errors = moments.pop("value_errors", None)
    if errors is not None:
        values["ppo/value_error"] = errors.mean_square.item()
        total = moments["ppo/returns"].variance
        values["ppo/explained_variance"] = float(1 - errors.variance / total) if total > 0 else 0.0
    for name, moment in moments.items():
        values[f"{name}_mean"], values[f"{name}_std"] = moment.value(), moment.std()
    return values


def moving_average(average: float | None, value: float, *, beta: float = 0.9) -> float:
    """Exponential average of a metric over steps; it starts at the first value."""
    return value if average is None else beta * average + (1 - beta) * value
