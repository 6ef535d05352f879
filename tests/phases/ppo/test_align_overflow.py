"""Where fp16 gradients of one model overflow, the other's step is skipped too, or not."""

from __future__ import annotations

from itertools import product

import pytest

from rlhf.config.roles import Role
from rlhf.phases.ppo.models import step_together
from rlhf.phases.shared.scoring import WholeSequences
from rlhf.types import StepReport
from tests.phases.ppo.ppo_pieces import PARTS, separate_engine, some_rollout


def stepped(*, actor: bool, critic: bool, aligned: bool) -> dict[Role, StepReport]:
    models = separate_engine(overflows=(actor, critic), align_overflow=aligned).models
    rollout = some_rollout()
    sequences = WholeSequences(rollout.prompts, rollout.responses)
    reports = {}
    for learners in models.learners(trains_actor=True):
        for learner, _ in product(learners, range(PARTS)):
            policy, values_BT = learner.forward(sequences)
            learner.engine.backward((values_BT if policy is None else policy.logprobs_BT).sum())
        reports |= step_together(learners)
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
