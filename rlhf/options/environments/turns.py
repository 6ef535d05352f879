"""What responses of several turns have in addition: observations, and the environment's rewards.

Shapes: B = episodes, T = tokens after the prompt, of turns and observations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from rlhf.base.types import NO_NUMBER, Responses

NO_TURN = NO_NUMBER  # in turn_BT, at a token that the policy did not write, and at padding


class Utterance(NamedTuple):
    """What was said in an episode after its prompt: by the assistant, a user or a tool."""

    role: str
    text: str


class Turns(NamedTuple):
    """The ``extras`` of responses that are episodes."""

    attend_BT: Tensor  # True at all tokens of the sequence, those of observations included
    turn_BT: Tensor  # the turn, from 0, of a token that the policy wrote; -1 elsewhere
    rewards_BT: Tensor  # the environment's reward of a turn, at its last token; 0 elsewhere
    truncated_B: Tensor  # True: the episode was cut, and the critic's value stands for the rest
    success_B: Tensor  # 1 or 0 as the environment says; 0 where it says nothing
    messages: list[list[Utterance]]
    failures: list[list[str]]  # names of FailureName, one for each failure of an episode


def turns_of(responses: Responses) -> Turns | None:
    """Return the turns of ``responses``; None if they are no episodes."""
    found: dict[str, Any] = dict(responses.extras)
    if "turn_BT" not in found:
        return None
    # In responses that were stored an utterance is a list.
    found["messages"] = [[Utterance(*each) for each in said] for said in found["messages"]]
    return Turns(**found)
