"""The interface of environments: text in, text out, in gymnasium's form.

An environment is any class with ``reset`` and ``step``. It knows no tokenizer, model or rank. An
episode is one conversation: ``reset``, then a ``step`` for every turn of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from rlhf.config.choices import FailureName


class Observation(NamedTuple):
    """What the policy reads before its next turn."""

    text: str
    role: str = "user"  # who says it, as the chat template names the speakers: user or tool


def as_observation(given: Observation | str) -> Observation:
    """Return what an environment says as an observation; text alone is the user's."""
    return given if isinstance(given, Observation) else Observation(given)


class Step(NamedTuple):
    """What follows a turn of the policy."""

    observation: Observation | str  # not read after the end of the episode
    reward: float = 0.0
    terminated: bool = False  # the task has ended: nothing more can be won
    truncated: bool = False  # the episode is cut: more could have been won
    info: Mapping[str, Any] = {}
    """``success`` (bool) counts in evaluations; ``malformed`` (bool) marks a turn that the
    environment could not read, such as a tool call that is no JSON."""


class Environment(Protocol):
    """One conversation at a time; the same seed, row and turns give the same episode."""

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> Observation | str:
        """Begin an episode; ``row`` holds the columns of the data's row, {} without data."""

    def step(self, text: str) -> Step:
        """Answer a turn of the policy."""

    # Where it has them: ``optimum: float``, the largest expected return; ``demonstration()``, the
    # next turn of an expert, which SFT learns from; ``random_turn(rng)``, a turn of a policy that
    # knows the rules and nothing else, the floor of evaluations.


class EpisodeStart(NamedTuple):
    """What an episode begins with: its seed, and the columns of the data's row."""

    seed: int
    row: Mapping[str, Any] = {}


class Player(StrEnum):
    """Players that an environment may bring along, to play a turn instead of the policy."""

    expert = "expert"
    random = "random"


class EnvironmentFacts(NamedTuple):
    """What an environment says of itself."""

    optimum: float | None = None
    players: tuple[Player, ...] = ()


class Reply(NamedTuple):
    """What a pool answers for one episode: an observation, a step, or a failure."""

    episode: int
    step: Step  # after reset: its observation alone
    failure: FailureName | None = None
    problem: str = ""  # the failure in one line, for messages
    turn: str = ""  # of a player

    @property
    def has_ended(self) -> bool:
        """Return True if the episode takes no turn after this reply."""
        return self.failure is not None or self.step.terminated or self.step.truncated

    @property
    def observation(self) -> Observation:
        """Return what the environment says."""
        return as_observation(self.step.observation)


class EnvironmentPool(Protocol):
    """Environments of many episodes; ``reset`` and ``step`` return before the environment has."""

    facts: EnvironmentFacts

    def reset(self, episode: int, *, seed: int, row: Mapping[str, Any]) -> None:
        """Begin the episode with this number, in place of an earlier one."""

    def step(self, episode: int, turn: str | Player) -> None:
        """Give a turn of the policy to an episode, or let one of its own players take the turn.

        Raises:
            KeyError: if the episode has not begun, or has ended.
        """

    def replies(self, *, wait: bool) -> list[Reply]:
        """Return replies since the last call; with ``wait`` at least one, [] if none is due."""

    def close(self) -> None:
        """End all episodes, and the processes of the pool."""
