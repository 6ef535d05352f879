"""Speed of the parts of a PPO step, in absolute numbers and relative to the hardware's peak.

FLOPs are the model's, counted as the planner counts them: neither recomputation for gradient
checkpointing nor padding is included (MFU of https://arxiv.org/abs/2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from rlhf.base.ranks import Ranks
from rlhf.base.types import Rollout
from rlhf.config.choices import Phase
from rlhf.config.machine_rates import machine_of
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.models.model_uses import (
    ModelUse,
    UnknownModelError,
    backward_to_forward_ratio,
    forward_flops,
    models_in_phase,
)
from rlhf.phases.ppo.step_metrics import trained_roles


class PerStage(NamedTuple):
    """One number for each stage of a PPO step."""

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
        """Return metrics of one step; the rollout holds the seconds of generating and scoring.

        ``values`` are the other metrics of the step, which show which models were trained.
        """
        assert rollout.seconds is not None, "the rollout was not timed"
        seconds = PerStage(**rollout.seconds, train=train_seconds)
        with_policy = not rollout.reuses_logprobs
        tokens_B = rollout.prompts.attend_BP.sum(dim=1) + rollout.responses.attend_BT.sum(dim=1)
        step = sum(seconds)
        found = {f"time/{part}_seconds": spent for part, spent in seconds._asdict().items()}
        found["time/step_seconds"] = step
        found["speed/tokens_per_second"] = float(self._ranks.sum(tokens_B.sum())) / step
        if not self._models:
            return found
        kept_B = rollout.responses.keep_BT.sum(dim=1)
        lengths = (tokens_B.tolist(), kept_B.tolist())
        trained = trained_roles(values)
        parts = self._flops_per_stage(*lengths, with_policy=with_policy, trained=trained)
        # Updates may end early (ppo.stop_update_kl); mini-batches count as equally long.
        passes = values["ppo/updates"] * self._ppo.mini_batch_size / self._ppo.rollout_batch_size
        here = parts._replace(train=passes * parts.train)
        everywhere = self._ranks.sum(tokens_B.new_tensor(here).double()).tolist()
        for part, operations, spent in zip(PerStage._fields, everywhere, seconds, strict=True):
            found[f"speed/{part}_tflops"] = operations / spent / 1e12
            found[f"speed/{part}_mfu"] = operations / spent / (self._peak * self._ranks.size)
        return found

    def _flops_per_stage(
        self,
        tokens: list[int],
        kept: list[int],
        *,
        with_policy: bool,
        trained: Collection[Role],
    ) -> PerStage:
        """Return each stage's FLOPs on sequences of tokens[i] tokens, kept[i] in the response.

        ``train`` is one pass over all sequences.
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
        if not self._ppo.shared_trunk:  # a trunk's one forward pass includes the reference
            score += actor * (with_policy - 1 + (Role.reference not in by_role))
        learning = sum(
            operations * (1 + backward_to_forward_ratio(replace(model, checkpointed=0)))
            for model, operations in forward.items()
            if model.role in trained
        )
        return PerStage(generate=actor, score=score, train=learning)
