"""How fast the parts of a PPO step are, beside what the hardware could do.

Operations are those of the model, counted as the planner counts them: what is computed again for
gradient checkpointing, and padding, is not among them (MFU of https://arxiv.org/abs/2204.02311,
appendix B).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.schema import RunConfig
from rlhf.planning.machine import machine_of
from rlhf.planning.models import ModelUse, UnknownModelError, models_of
from rlhf.planning.timing import backward_share, forward_operations
from rlhf.types import Ranks, Rollout


class PerPart(NamedTuple):
    """One number for each part of a step."""

    generate: float
    score: float
    train: float


class StepSpeed:
    """Time and speed of PPO's steps, of all ranks together."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        self._ranks = ranks
        self._ppo = config.ppo
        self._peak = machine_of(config.hardware).operations  # per second, of one rank
        try:
            self._models: tuple[ModelUse, ...] = models_of(config, Phase.ppo)
        except UnknownModelError:  # then nobody can count its operations
            self._models = ()

    def values(self, rollout: Rollout, seconds: PerPart, *, with_policy: bool) -> dict[str, float]:
        """Metrics of one step; ``with_policy``: the actor was run to score its own responses."""
        tokens_B = rollout.prompts.attend_BP.sum(dim=1) + rollout.responses.keep_BT.sum(dim=1)
        step = sum(seconds)
        values = {f"time/{part}_seconds": spent for part, spent in seconds._asdict().items()}
        values["time/step_seconds"] = step
        values["speed/tokens_per_second"] = float(self._ranks.sum(tokens_B.sum())) / step
        if not self._models:
            return values
        kept_B = rollout.responses.keep_BT.sum(dim=1)
        here = self._operations(tokens_B.tolist(), kept_B.tolist(), with_policy=with_policy)
        everywhere = self._ranks.sum(tokens_B.new_tensor(here).double()).tolist()
        for part, operations, spent in zip(PerPart._fields, everywhere, seconds, strict=True):
            values[f"speed/{part}_tflops"] = operations / spent / 1e12
            values[f"speed/{part}_mfu"] = operations / spent / (self._peak * self._ranks.size)
        return values

    def _operations(self, tokens: list[int], kept: list[int], *, with_policy: bool) -> PerPart:
        """Operations on sequences of so many tokens, of which so many are in the response."""
        forward = {
            model: sum(
                forward_operations(model, sequences=1, tokens=length, positions=response)
                for length, response in zip(tokens, kept, strict=True)
            )
            for model in self._models
        }
        by_role = {model.role: operations for model, operations in forward.items()}
        actor = by_role[Role.actor]
        score = sum(forward.values())
        if not self._ppo.shared_trunk:  # whose one pass gives the reference too
            score += actor * (with_policy - 1 + (Role.reference not in by_role))
        learning = sum(
            operations * (1 + backward_share(replace(model, checkpointed=0)))
            for model, operations in forward.items()
            if not model.role.is_frozen
        )
        return PerPart(generate=actor, score=score, train=learning * self._ppo.ppo_epochs)
