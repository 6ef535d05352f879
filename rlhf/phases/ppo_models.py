"""What PPO asks of its models, whether they are separate or branches of one trunk.

Shapes: B = sequences, T = response tokens, S = tokens of whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rlhf.algorithms.logprobs import Picks, Reading
from rlhf.models.lora import adapters_off
from rlhf.rollout.experience import (
    Opinions,
    ResponseLogprobs,
    Scores,
    WholeSequences,
    language_logprobs,
    response_logprobs,
    response_values,
)
from rlhf.types import Engine, Model, SequenceBatch, StepReport

# A loss from what a model says of response tokens: to be divided already, and without side effects
# on the model.
PolicyLossOf = Callable[[ResponseLogprobs], Tensor]
ValueLossOf = Callable[[Tensor], Tensor]  # of values (B, T)


class Reports(NamedTuple):
    """What one optimiser step of PPO did; None for a model that took none."""

    actor: StepReport | None
    critic: StepReport | None
    actor_overflowed: bool = False
    critic_overflowed: bool = False


class PpoModels(Protocol):
    """The models of PPO behind the things that it does with them."""

    actor: Engine  # keeps the policy that answers prompts
    critic: Engine | None  # None: there is none, or it is a branch of the actor

    def opinions(self, sequences: WholeSequences, *, with_policy: bool = True) -> Opinions:
        """Log-probabilities, values and scores, without gradients and dropout."""

    def learn(
        self,
        sequences: WholeSequences,
        *,
        actor_loss: PolicyLossOf | None,
        critic_loss: ValueLossOf,
    ) -> None:
        """Add the gradients of one micro-batch; without ``actor_loss`` the actor is frozen."""

    def language_logprobs(self, batch: SequenceBatch) -> Tensor:
        """The policy's log-probabilities (N,) of the kept tokens of whole sequences."""

    def step(self) -> Reports:
        """Step the optimisers; all micro-batches must be in."""


class AdapterOff:
    """The base of a model with adapters: the reference that needs no second copy; a ``Model``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass as if there were no adapters."""
        with adapters_off(self._engine.module):
            return self._engine(*args, **kwargs)

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The module without adapters, dropout and gradients."""
        with adapters_off(self._engine.module), self._engine.evaluating() as module:
            yield module


def add_gradient(engine: Engine, loss: Tensor) -> None:
    """One micro-batch's gradient; the step itself is left to the caller."""
    engine.backward(loss)
    if not engine.is_step_due:
        engine.step()


class SeparateModels:
    """Actor, reference and critic, each an engine, and what scores; a ``PpoModels``."""

    def __init__(
        self,
        actor: Engine,
        reference: Model,
        critic: Engine | None,
        scores: Scores,
        *,
        temperature: float,
        align_overflow: bool = True,
        entropy_gradient: bool = False,
    ) -> None:
        self.actor = actor
        self.reference = reference
        self.critic = critic
        self.scores = scores
        self._scoring = Reading(temperature, with_entropy=False)
        self._training = Reading(temperature, entropy_gradient=entropy_gradient)
        self._align_overflow = align_overflow
        self._learning: list[Engine] = []  # those with gradients for the step to come
        self._reports = Reports(None, None)

    def opinions(self, sequences: WholeSequences, *, with_policy: bool = True) -> Opinions:
        """What each model thinks of the responses."""
        logprobs_BT = self._logprobs(self.actor, sequences) if with_policy else None
        reference_BT = self._logprobs(self.reference, sequences)
        values_BT = torch.zeros_like(reference_BT)
        if self.critic is not None:
            with self.critic.evaluating():
                values_BT = response_values(self.critic, sequences)
        return Opinions(logprobs_BT, reference_BT, values_BT, self.scores(sequences))

    def learn(
        self,
        sequences: WholeSequences,
        *,
        actor_loss: PolicyLossOf | None,
        critic_loss: ValueLossOf,
    ) -> None:
        """One model after the other, so that only one keeps its activations."""
        self._learning = []
        if self.critic is not None:
            is_last = self.critic.is_step_due
            add_gradient(self.critic, critic_loss(response_values(self.critic, sequences)))
            self._learning.append(self.critic)
            if is_last and not self._align_overflow:
                self._step(self.critic)  # so that its gradients are gone before the actor's come
        if actor_loss is not None:
            policy = response_logprobs(self.actor, sequences, self._training)
            add_gradient(self.actor, actor_loss(policy))
            self._learning.append(self.actor)

    def language_logprobs(self, batch: SequenceBatch) -> Tensor:
        """The actor's log-probabilities of the kept tokens."""
        return language_logprobs(self.actor, batch)

    def step(self) -> Reports:
        """Step both, or neither where one overflows and they are aligned."""
        overflows = [engine.has_overflow() for engine in self._learning]
        discards = self._align_overflow and any(overflows)
        for engine, overflow in list(zip(self._learning, overflows, strict=True)):
            self._step(engine, discard=discards and not overflow)
        reports, self._reports = self._reports, Reports(None, None)
        return reports

    def _step(self, engine: Engine, *, discard: bool = False) -> None:
        overflow = engine.has_overflow()
        report = engine.step(discard=discard)
        self._learning.remove(engine)
        if engine is self.actor:
            self._reports = self._reports._replace(actor=report, actor_overflowed=overflow)
        else:
            self._reports = self._reports._replace(critic=report, critic_overflowed=overflow)

    def _logprobs(self, model: Model, sequences: WholeSequences) -> Tensor:
        with model.evaluating():
            return response_logprobs(model, sequences, self._scoring).logprobs_BT


class TrunkModels:
    """Policy, values and reference from one pass through a shared trunk; a ``PpoModels``."""

    def __init__(
        self, trunk: Engine, scores: Scores, *, temperature: float, entropy_gradient: bool = False
    ) -> None:
        self.actor = trunk
        self.critic: Engine | None = None
        self.scores = scores
        self._scoring = Reading(temperature, with_entropy=False)
        self._training = Reading(temperature, entropy_gradient=entropy_gradient)

    def opinions(self, sequences: WholeSequences, *, with_policy: bool = True) -> Opinions:
        """One pass through the trunk, and the scores."""
        with self.actor.evaluating():
            output = self.actor(
                sequences.ids_BS,
                sequences.picks,
                self._scoring,
                with_policy=with_policy,
                with_reference=True,
            )
        return Opinions(
            sequences.told(output.policy).logprobs_BT if with_policy else None,
            sequences.told(output.reference).logprobs_BT,
            sequences.before_response(output.values_BS),
            self.scores(sequences),
        )

    def learn(
        self,
        sequences: WholeSequences,
        *,
        actor_loss: PolicyLossOf | None,
        critic_loss: ValueLossOf,
    ) -> None:
        """One pass for both, forward and backward; a trunk always learns as a whole."""
        assert actor_loss is not None, "a shared trunk has no steps for the critic alone"
        output = self.actor(sequences.ids_BS, sequences.picks, self._training)
        loss = critic_loss(sequences.before_response(output.values_BS))
        add_gradient(self.actor, loss + actor_loss(sequences.told(output.policy)))

    def language_logprobs(self, batch: SequenceBatch) -> Tensor:
        """The policy's log-probabilities of the kept tokens."""
        reading = Reading(with_entropy=False)
        logprobs_N: Tensor = self.actor(batch.ids_BS, Picks.of(batch), reading).policy.logprobs_N
        return logprobs_N

    def step(self) -> Reports:
        """One step of all trained layers and heads."""
        overflowed = self.actor.has_overflow()
        return Reports(self.actor.step(), None, actor_overflowed=overflowed)
