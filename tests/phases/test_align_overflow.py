"""Where fp16 gradients of one model overflow, the other's step is skipped too, or not."""

from __future__ import annotations

import pytest

from rlhf.phases.ppo_models import Reports
from rlhf.rollout.experience import WholeSequences
from tests.phases.ppo_pieces import PARTS, separate_engine, some_rollout


def stepped(*, actor: bool, critic: bool, aligned: bool) -> Reports:
    models = separate_engine(overflows=(actor, critic), align_overflow=aligned).models
    rollout = some_rollout()
    sequences = WholeSequences(rollout.prompts, rollout.responses)
    for _ in range(PARTS):
        models.learn(
            sequences,
            actor_loss=lambda policy: policy.logprobs_BT.sum(),
            critic_loss=lambda values_BT: values_BT.sum(),
        )
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
