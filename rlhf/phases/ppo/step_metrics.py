"""Metrics of a PPO step, merged over micro-batches, updates and ranks, and the step's speed.

The speed of each stage is given in FLOPs per second, and relative to the hardware's peak. Only
the model's own FLOPs count, as in the planner: neither recomputation for gradient checkpointing
nor padding is included (MFU of https://arxiv.org/abs/2204.02311, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.kl import estimate_kl
from rlhf.base.metrics import Maximum, Mean, Metrics, Minimum, Moments
from rlhf.base.ranks import Ranks
from rlhf.base.types import PromptBatch, Responses, Rollout, StepReport
from rlhf.config.choices import Phase
from rlhf.config.machine_rates import machine_of
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.models.model_uses import (
    ModelUse,
    backward_to_forward_ratio,
    forward_flops,
    models_in_phase,
)
from rlhf.models.shapes import UnknownModelError
from rlhf.options import PpoConfig
from rlhf.phases.ppo.targets import Targets
from rlhf.phases.shared.scoring import kl_per_sequence

EQUAL_WITHIN = 1e-6  # largest spread of equal scores; times the largest score if that is above 1


class PpoStats(NamedTuple):
    """The result of one PPO step; losses are means per response token, 0 of untrained models."""

    actor_loss: float
    critic_loss: float
    metrics: dict[str, float]
    targets: Targets


def rollout_numbers(rollout: Rollout, targets: Targets) -> dict[str, list[float]]:
    """Return this rank's finite scores, lengths, KL and advantages, for histograms."""
    keep_BT = rollout.responses.keep_BT
    tensors = {
        "score": rollout.scores_B,
        "response_tokens": keep_BT.sum(dim=1),
        "kl_to_reference": kl_per_sequence(rollout),
        "advantages": targets.raw.advantages_BT[keep_BT],
    }
    finite = {name: values[values.isfinite()].tolist() for name, values in tensors.items()}
    return {name: values for name, values in finite.items() if values}


def rollout_metrics(
    rollout: Rollout, targets: Targets, part_names: Iterable[str] = (), *, has_critic: bool
) -> Metrics:
    """Return metrics of a rollout of B responses of T tokens, before any update."""
    keep_BT = rollout.responses.keep_BT
    kl_BT = estimate_kl(rollout.logprobs_BT, rollout.reference_logprobs_BT, estimator="k1")
    same_B = same_response_mask(rollout.prompts, rollout.responses)
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
        "ppo/same_response_share": Mean.of(same_B.float()),
    }
    if targets.clipped_scores_GR.shape[1] > 1:
        equal_G = equal_scores_mask(targets.clipped_scores_GR)
        metrics["ppo/equal_group_share"] = Mean.of(equal_G.float())
    if has_critic:
        errors_BT = targets.raw.returns_BT - rollout.values_BT
        metrics["ppo/values"] = Moments.of(rollout.values_BT, keep_BT)
        metrics["ppo/values_min"] = Minimum.of(rollout.values_BT, keep_BT)
        metrics["ppo/values_max"] = Maximum.of(rollout.values_BT, keep_BT)
        metrics["value_errors"] = Moments.of(errors_BT, keep_BT)
    if rollout.parts is not None:
        parts = zip(part_names, rollout.parts.scores_BK.unbind(1), strict=True)
        for name, scores_B in (*parts, *rollout.parts.criteria.items()):
            metrics[f"ppo/parts/{name}"] = Mean.of(scores_B)
        metrics["ppo/fallback_share"] = Mean.of(rollout.parts.failed_BK.any(dim=1).float())
    metrics |= {f"ppo/{name}": Mean.of(each) for name, each in rollout.measures.items()}
    return metrics | dict(targets.metrics)


def equal_scores_mask(scores_GR: Tensor) -> Tensor:
    """Return a mask (G,), True for a group of R responses that have the same score."""
    spread_G = scores_GR.amax(dim=1) - scores_GR.amin(dim=1)
    return spread_G <= EQUAL_WITHIN * scores_GR.abs().amax(dim=1).clamp_min(1.0)


def same_response_mask(prompts: PromptBatch, responses: Responses) -> Tensor:
    """Return a mask (B,), True at the most frequent response that two or more prompts got.

    Other repeats do not count: short right answers of different prompts are often equal.
    """
    prompt_B = _label_equal_rows(prompts.ids_BP.masked_fill(~prompts.attend_BP.bool(), -1))
    response_B = _label_equal_rows(responses.ids_BT.masked_fill(~responses.keep_BT, -1))
    answers_A2 = torch.unique(torch.stack([response_B, prompt_B], dim=1), dim=0)  # A: unique pairs
    num_prompts_R = torch.bincount(answers_A2[:, 0])  # R: distinct responses
    times_R = torch.bincount(response_B) * (num_prompts_R > 1)
    return (response_B == times_R.argmax()) & (times_R.max() > 0)


def _label_equal_rows(rows_BX: Tensor) -> Tensor:
    """Return a number per row; equal rows have equal numbers."""
    _, numbers_B = torch.unique(rows_BX, dim=0, return_inverse=True)
    assert isinstance(numbers_B, Tensor)
    return numbers_B


def values_to_log(metrics: Metrics, updates: list[dict[Role, StepReport]]) -> dict[str, float]:
    """Return the numbers to log for one PPO step, from its merged metrics and optimizer steps."""
    return _to_floats(metrics) | _optimizer_values(updates)


def _optimizer_values(updates: list[dict[Role, StepReport]]) -> dict[str, float]:
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
    """Return merged metrics as floats; ``Moments`` become a mean and a standard deviation.

    A mean over no values is skipped: its 0 would steer controllers that adapt to it, such as the
    entropy bonus's coefficient.
    """
    moments = {name: m for name, m in metrics.items() if type(m) is Moments}
    means = {name: m for name, m in metrics.items() if name not in moments}
    values = {name: m.value() for name, m in means.items() if type(m) is not Mean or m.count > 0}
    errors = moments.pop("value_errors", None)
    if errors is not None:
        values["ppo/value_error"] = errors.mean_square.item()
        total = moments["ppo/returns"].variance
        values["ppo/explained_variance"] = float(1 - errors.variance / total) if total > 0 else 0.0
    for name, moment in moments.items():
        values[f"{name}_mean"], values[f"{name}_std"] = moment.value(), moment.std()
    return values


def trained_roles(values: Mapping[str, float]) -> list[Role]:
    """Return which of actor and critic took optimizer steps in a PPO step with these metrics."""
    return [role for role in (Role.actor, Role.critic) if f"ppo/{role}_learning_rate" in values]


def num_optimizer_steps(values: Mapping[str, float]) -> float:
    """Return the number of optimizer steps of all models in a PPO step with these metrics."""
    return values["ppo/updates"] * len(trained_roles(values))


def update_score_average(average: float | None, value: float, *, beta: float = 0.9) -> float:
    """Return the exponential moving ``average`` after ``value``, which is skipped if not finite.

    An average that is None or not finite is replaced by ``value``, even if that is not finite.
    """
    if average is None or not math.isfinite(average):
        return value
    return beta * average + (1 - beta) * value if math.isfinite(value) else average


def early_end_reason(config: PpoConfig, values: Mapping[str, float]) -> str | None:
    """Return why PPO should end after a step with these metrics; None to continue."""
    limit, kl = config.stop_run_kl, values["ppo/kl_to_reference"]
    if limit is None or kl <= limit:
        return None
    fault = f"above ppo.stop_run_kl={limit:g}" if math.isfinite(kl) else "not finite"
    return f"ppo/kl_to_reference={kl:.3g} is {fault}"


class PerStage(NamedTuple):
    """One number, such as seconds or FLOPs, for each stage of a PPO step."""

    generate: float
    score: float
    train: float


class StepSpeed:
    """A meter of the time and speed of PPO steps, over all ranks."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        self._ranks = ranks
        self._ppo = config.ppo
        self._peak = machine_of(config.hardware).operations  # FLOPs per second of one rank
        try:
            self._models: tuple[ModelUse, ...] = models_in_phase(config, Phase.ppo)
        except UnknownModelError:  # FLOPs of this architecture cannot be counted
            self._models = ()

    def metrics(
        self, rollout: Rollout, values: Mapping[str, float], *, train_seconds: float
    ) -> dict[str, float]:
        """Return time and speed of one step; ``rollout`` has the seconds of sampling and scoring.

        ``values`` are the other metrics of the step, which show which models were trained.
        """
        assert rollout.seconds is not None, "the rollout was not timed"
        seconds = PerStage(**rollout.seconds, train=train_seconds)
        with_policy = not rollout.reuses_logprobs
        tokens_B = rollout.prompts.attend_BP.sum(dim=1) + rollout.responses.attend_BT.sum(dim=1)
        step_seconds = sum(seconds)
        speeds = {f"time/{stage}_seconds": spent for stage, spent in seconds._asdict().items()}
        speeds["time/step_seconds"] = step_seconds
        speeds["speed/tokens_per_second"] = float(self._ranks.sum(tokens_B.sum())) / step_seconds
        if not self._models:
            return speeds
        kept_B = rollout.responses.keep_BT.sum(dim=1)
        lengths = (tokens_B.tolist(), kept_B.tolist())
        trained = trained_roles(values)
        flops = self._flops_per_stage(*lengths, with_policy=with_policy, trained=trained)
        # Count only the passes made: updates may end early (ppo.stop_update_kl).
        passes = values["ppo/updates"] * self._ppo.mini_batch_size / self._ppo.rollout_batch_size
        rank_flops = flops._replace(train=passes * flops.train)
        total_flops = self._ranks.sum(tokens_B.new_tensor(rank_flops).double()).tolist()
        for stage, operations, spent in zip(PerStage._fields, total_flops, seconds, strict=True):
            speeds[f"speed/{stage}_tflops"] = operations / spent / 1e12
            speeds[f"speed/{stage}_mfu"] = operations / spent / (self._peak * self._ranks.size)
        return speeds

    def _flops_per_stage(
        self, tokens: list[int], kept: list[int], *, with_policy: bool, trained: Collection[Role]
    ) -> PerStage:
        """Return each stage's FLOPs; sequence i has tokens[i] tokens, kept[i] in the response.

        The FLOPs of the stage train are those of one pass over all sequences.
        """
        forward = {
            model: sum(
                forward_flops(model, sequences=1, tokens=length, positions=response)
                for length, response in zip(tokens, kept, strict=True)
            )
            for model in self._models
        }
        by_role = {model.role: operations for model, operations in forward.items()}
        actor = by_role[Role.actor]
        score = sum(forward.values())
        if not self._ppo.shared_trunk:  # a shared trunk's forward pass includes the reference
            score += actor * (with_policy - 1 + (Role.reference not in by_role))
        learning = sum(
            operations * (1 + backward_to_forward_ratio(replace(model, checkpointed=0)))
            for model, operations in forward.items()
            if model.role in trained
        )
        return PerStage(generate=actor, score=score, train=learning)
