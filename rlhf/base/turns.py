"""What responses of several turns have besides those of one.

Shapes: B = episodes, T = tokens after the prompt.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NO_TURN = -1  # in Turns.turn_BT, at a token that the policy did not write, and at padding


class Utterance(NamedTuple):
    """What was said in an episode after its prompt: by the assistant, a user or a tool."""

    role: str
    text: str


class Turns(NamedTuple):
    """What responses of several turns have besides those of one: observations between turns."""

    attend_BT: Tensor  # True at all tokens of the sequence, those of observations included
    turn_BT: Tensor  # the turn, from 0, of a token that the policy wrote; -1 elsewhere
    rewards_BT: Tensor  # the environment's reward of a turn, at its last token; 0 elsewhere
    truncated_B: Tensor  # True: the episode was cut, and the critic's value stands for the rest
    success_B: Tensor  # 1 or 0 as the environment says; 0 where it says nothing
    messages: list[list[Utterance]]
    failures: list[list[str]]  # names of FailureName, one for each failure of an episode
