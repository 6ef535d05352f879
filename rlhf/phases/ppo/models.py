"""The models of PPO: their interface, and an implementation with one engine per model.

Shapes: B = sequences, T = response tokens, S = tokens of whole sequences, N = kept tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlhf.base.metrics import Metrics
from rlhf.base.types import (
    Engine,
    LogprobOptions,
    SequenceBatch,
    StepReport,
    TokenEngine,
    TokenModel,
    ValueEngine,
)
from rlhf.config.roles import Role
from rlhf.models.language_model import kept_token_logprobs
from rlhf.phases.ppo.objective import MicroBatch, Objective
from rlhf.phases.shared.scoring import (
    ModelOutputs,
    RewardFunction,
    ScoreSequences,
    ScoringModels,
    WholeSequences,
    response_logprobs,
    response_values,
)


class Learner(NamedTuple):
    """A model in training; ``loss`` runs it on a micro-batch, and returns its loss and metrics."""

    role: Role
    engine: Engine
    loss: Callable[[MicroBatch, Objective], tuple[Tensor, Metrics]]


class SeparateModels:
    """Actor, reference and critic, each in its own engine; implements ``ScoringModels``."""

    def __init__(
        self,
        actor: TokenEngine,
        reference: TokenModel,
        critic: ValueEngine | None,
        scores: ScoreSequences,
        rewards: RewardFunction | None = None,
        *,
        temperature: float,
        align_overflow: bool = True,
        entropy_gradient: bool = False,
    ) -> None:
        self.actor = actor
        self.reference = reference
        self.critic = critic
        self.scores = scores
        self.rewards = rewards
        self._align_overflow = align_overflow
        self._scoring = LogprobOptions(temperature, with_entropy=False)
        self._training = LogprobOptions(temperature, entropy_gradient=entropy_gradient)

    def score(self, sequences: WholeSequences, *, with_policy: bool = True) -> ModelOutputs:
        """Run actor, reference, critic and reward model, in this order; return their outputs."""
        logprobs_BT = self.response_logprobs(self.actor, sequences) if with_policy else None
        reference_BT = self.response_logprobs(self.reference, sequences)
        values_BT = torch.zeros_like(reference_BT)
        last_values_B = reference_BT.new_zeros(len(reference_BT))
        if self.critic is not None:
            with self.critic.evaluating():
                values_BS = self.critic(sequences.ids_BS)
                values_BT = sequences.select_predicting_positions(values_BS)
                last_values_B = sequences.last_token_values(values_BS)
        scores = self.scores(sequences)
        return ModelOutputs(logprobs_BT, reference_BT, values_BT, last_values_B, *scores)

    def learner_groups(self, *, trains_actor: bool) -> list[list[Learner]]:
        """Return the models to train in groups that step together: critic, then actor.

        Each learner runs all its micro-batches before the next learner starts: the activations of
        one model, and the gradients of one group, are held at a time. With ``align_overflow``
        critic and actor are one group: an fp16 overflow in either skips both optimizer steps.
        """
        learners = []
        if self.critic is not None:
            learners.append(Learner(Role.critic, self.critic, self._critic_loss))
        if trains_actor:
            learners.append(Learner(Role.actor, self.actor, self._actor_loss))
        return [learners] if self._align_overflow else [[learner] for learner in learners]

    def actor_logprobs(self, batch: SequenceBatch) -> Tensor:
        """Return the actor's log-probabilities (N,) of the kept tokens."""
        return kept_token_logprobs(self.actor, batch)

    def _actor_loss(self, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Metrics]:
        policy = response_logprobs(self.actor, batch.sequences, self._training)
        return objective.actor_loss(policy, batch)

    def _critic_loss(self, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Metrics]:
        assert self.critic is not None
        return objective.critic_loss(response_values(self.critic, batch.sequences), batch)

    def response_logprobs(self, model: TokenModel, sequences: WholeSequences) -> Tensor:
        """Return the log-probabilities (B, T) of the response tokens, without gradients."""
        with model.evaluating():
            return response_logprobs(model, sequences, self._scoring).logprobs_BT


class PpoModels(ScoringModels, Protocol):
    """The interface to PPO's models, which are separate or, in an option, share weights."""

    @property
    def actor(self) -> Engine:
        """Return the engine of the policy."""

    @property
    def critic(self) -> ValueEngine | None:
        """Return the critic's engine; None without a critic, or if it shares the actor's engine."""

    def learner_groups(self, *, trains_actor: bool) -> list[list[Learner]]:
        """Return the models to train in groups that step together."""

    def actor_logprobs(self, batch: SequenceBatch) -> Tensor:
        """Return the actor's log-probabilities (N,) of the kept tokens."""


def step_optimizers_together(learners: Sequence[Learner]) -> dict[Role, StepReport]:
    """Step all optimizers, or none if any fp16 gradient has overflowed; return their reports."""
    overflows = [learner.engine.has_overflow() for learner in learners]
    reports = {}
    for learner, overflow in zip(learners, overflows, strict=True):
        report = learner.engine.step(discard=any(overflows) and not overflow)
        reports[learner.role] = report._replace(has_overflowed=overflow)
    return reports
