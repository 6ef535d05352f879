"""Where fp16 gradients of one model overflow, the other's step is skipped too, or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf.phases.ppo_models import Reports, SeparateModels
from rlhf.types import StepReport
from tests.plain_engine import PlainEngine


class Overflowing(PlainEngine):
    """Overflows or not, and steps unless it is told to discard."""

    is_step_due = True

    def __init__(self, *, overflows: bool) -> None:
        super().__init__(nn.Linear(1, 1))
        self._overflows = overflows

    def backward(self, loss: torch.Tensor) -> None: ...

    def has_overflow(self) -> bool:
        return self._overflows

    def step(self, *, discard: bool = False) -> StepReport:
        return StepReport(0.5, 2.0, is_skipped=discard or self._overflows)


def stepped(*, actor: bool, critic: bool, aligned: bool) -> Reports:
    engines = [Overflowing(overflows=overflows) for overflows in (actor, False, critic, False)]
    models = SeparateModels(*engines, temperature=1.0, align_overflow=aligned)
    models.backward(torch.zeros(()), torch.zeros(()))
    return models.step()


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("actor", [False, True])
def test_both_step_or_neither_where_they_are_aligned(
    *, actor: bool, critic: bool, aligned: bool
) -> None:
    reports = stepped(actor=actor, critic=critic, aligned=aligned)
    assert (reports.actor_overflowed, reports.critic_overflowed) == (actor, critic)
    assert reports.actor is not None
    assert reports.critic is not None
    skipped = (reports.actor.is_skipped, reports.critic.is_skipped)
    assert skipped == ((actor or critic,) * 2 if aligned else (actor, critic))
