"""The additional data of responses that are episodes: turns, rewards of turns and messages.

Shapes: B = episodes, T = tokens after the prompt, of turns and observations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from rlhf.base.types import NO_NUMBER, Responses

NO_TURN = NO_NUMBER  # value of turn_BT at padding, and at tokens that the policy did not write


class Utterance(NamedTuple):
    """A message of an episode after its prompt, by the assistant, a user or a tool."""

    role: str
    text: str


class Turns(NamedTuple):
    """The additional data of responses that are episodes, stored as their ``extras``."""

    attend_BT: Tensor  # True at all tokens of turns and observations, False at padding
    turn_BT: Tensor  # index of the turn, from 0, at tokens that the policy wrote; -1 elsewhere
    rewards_BT: Tensor  # the environment's reward for a turn, at the turn's last token; 0 elsewhere
    truncated_B: Tensor  # True: the episode was cut, so GAE bootstraps from the critic's value
    success_B: Tensor  # 1 or 0 as the environment reports; 0 if it reports nothing
    messages: list[list[Utterance]]
    failures: list[list[str]]  # members of FailureName, one for each failure of an episode


def turns_of(responses: Responses) -> Turns | None:
    """Return the turns of ``responses``, or None if the responses are not episodes."""
    fields: dict[str, Any] = dict(responses.extras)
    if "turn_BT" not in fields:
        return None
    # Responses that were read from a file have lists instead of ``Utterance`` tuples.
    fields["messages"] = [[Utterance(*each) for each in row] for row in fields["messages"]]
    return Turns(**fields)
