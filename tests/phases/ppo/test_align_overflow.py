"""Where fp16 gradients of one model overflow, the other's step is skipped too, or not."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.base.types import StepReport
from rlhf.config.roles import Role
from rlhf.phases.ppo.models import step_optimizers_together
from rlhf.phases.ppo.objective import MicroBatch
from rlhf.phases.shared.scoring import WholeSequences
from tests.phases.ppo.ppo_pieces import PARTS, separate_engine, some_rollout


def stepped(*, actor: bool, critic: bool, aligned: bool) -> dict[Role, StepReport]:
    models = separate_engine(overflows=(actor, critic), align_overflow=aligned).models
    rollout = some_rollout()
    nothing_BT = torch.zeros(rollout.responses.ids_BT.shape)
    sequences = WholeSequences(rollout.prompts, rollout.responses)
    batch = MicroBatch(sequences, *[nothing_BT] * 5)
    objective: Any = SimpleNamespace(
        actor_loss=lambda policy, _: (policy.logprobs_BT.sum(), {}),
        critic_loss=lambda values_BT, _: (values_BT.sum(), {}),
    )
    reports = {}
    for learners in models.learner_groups(trains_actor=True):
        for learner, _ in product(learners, range(PARTS)):
            loss, _ = learner.loss(batch, objective)
            learner.engine.backward(loss)
        reports |= step_optimizers_together(learners)
    return reports


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("actor", [False, True])
def test_both_step_or_neither_where_they_are_aligned(
    *, actor: bool, critic: bool, aligned: bool
) -> None:
    reports = stepped(actor=actor, critic=critic, aligned=aligned)
    assert list(reports) == [Role.critic, Role.actor]
    steps = reports[Role.actor], reports[Role.critic]
    assert [step.has_overflowed for step in steps] == [actor, critic]
    skipped = tuple(step.is_skipped for step in steps)
    assert skipped == ((actor or critic,) * 2 if aligned else (actor, critic))
