"""Environments in this process, which answer at once; for those that come with this program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from rlhf.environments.checked_answers import checked_observation, checked_step, reply_of
from rlhf.environments.interface import (
    Environment,
    EnvironmentFacts,
    EpisodeStart,
    Player,
    Reply,
    Step,
)

TURNS = {Player.expert: "demonstration", Player.random: "random_turn"}  # methods of players


def facts_of(environment: Environment) -> EnvironmentFacts:
    """Return what an environment says of itself."""
    optimum = getattr(environment, "optimum", None)
    players = tuple(player for player, name in TURNS.items() if hasattr(environment, name))
    return EnvironmentFacts(optimum, players)


class EpisodeEnvironments:
    """The environments of the episodes in this process; those that have ended are dropped."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environments: dict[int, tuple[Environment, Random]] = {}

    def reset(self, episode: int, start: EpisodeStart) -> Reply:
        """Begin an episode in an environment of its own."""

        def call() -> Step:
            environment = self._make()
            self._environments[episode] = environment, Random(f"random {start.seed}")
            return Step(checked_observation(environment.reset(seed=start.seed, row=start.row)))

        return self._finished(reply_of(episode, call))

    def step(self, episode: int, turn: str | Player) -> Reply:
        """Give a turn to an episode, or let a player take it; KeyError if it is not open."""
        environment, rng = self._environments[episode]
        text = ""

        def call() -> Step:
            nonlocal text
            text = self._turn_of(turn, environment, rng)
            return checked_step(environment.step(text))

        reply = reply_of(episode, call)
        if isinstance(turn, Player):
            reply = reply._replace(turn=text)
        return self._finished(reply)

    def _turn_of(self, turn: str | Player, environment: Any, rng: Random) -> str:
        match turn:
            case Player.expert:
                return str(environment.demonstration())
            case Player.random:
                return str(environment.random_turn(rng))
            case text:
                return text

    def _finished(self, reply: Reply) -> Reply:
        if reply.has_ended:
            self._environments.pop(reply.episode, None)
        return reply


class LocalPool:
    """A pool whose environments run in this process; nothing limits their time."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self.facts = facts_of(make())  # a wrong configuration is refused here
        self._episodes = EpisodeEnvironments(make)
        self._replies: list[Reply] = []

    def reset(self, episode: int, *, seed: int, row: Mapping[str, Any]) -> None:
        """Begin the episode with this number, in place of an earlier one."""
        self._replies.append(self._episodes.reset(episode, EpisodeStart(seed, row)))

    def step(self, episode: int, turn: str | Player) -> None:
        """Give a turn of the policy to an episode, or let a player take it."""
        self._replies.append(self._episodes.step(episode, turn))

    def replies(self, *, wait: bool) -> list[Reply]:  # noqa: ARG002 - all have been answered
        """Return the replies since the last call."""
        found, self._replies = self._replies, []
        return found

    def close(self) -> None:
        """Forget all episodes."""
        self._replies = []
