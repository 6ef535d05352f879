"""Episodes that one of an environment's own players plays: its expert, or a random one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlhf.config.choices import FailureName
from rlhf.environments.interface import (
    EnvironmentPool,
    EpisodeStart,
    Observation,
    Player,
    Reply,
)

TOGETHER = 256  # episodes that are open at once


class PlayedTurn(NamedTuple):
    """A turn of a player, and what followed it."""

    text: str
    observation: Observation | None  # None: the episode ended
    reward: float


class PlayedEpisode(NamedTuple):
    """One episode as it was played; ``failure`` ended it."""

    first: Observation
    turns: list[PlayedTurn]
    success: float | None
    failure: FailureName | None
    problem: str

    @property
    def total(self) -> float:
        """Return the sum of the rewards."""
        return sum(turn.reward for turn in self.turns)


def play_episodes(
    pool: EnvironmentPool, starts: Sequence[EpisodeStart], *, player: Player | None, max_turns: int
) -> list[PlayedEpisode]:
    """Play an episode from each of ``starts``; without a ``player`` only begin it."""
    episodes: list[PlayedEpisode] = []
    for begin in range(0, len(starts), TOGETHER):
        some = starts[begin : begin + TOGETHER]
        found: dict[int, PlayedEpisode] = {}
        for episode, start in enumerate(some):
            pool.reset(episode, seed=start.seed, row=start.row)
        is_open = set(range(len(some)))
        while is_open:
            for reply in pool.replies(wait=True):
                found[reply.episode] = _with_reply(found.get(reply.episode), reply)
                turns = len(found[reply.episode].turns)
                if player is None or reply.has_ended or turns == max_turns:
                    is_open.discard(reply.episode)
                else:
                    pool.step(reply.episode, player)
        episodes += [found[episode] for episode in range(len(some))]
    return episodes


def _with_reply(played: PlayedEpisode | None, reply: Reply) -> PlayedEpisode:
    if played is None:
        return PlayedEpisode(reply.observation, [], None, reply.failure, reply.problem)
    observation = None if reply.has_ended else reply.observation
    turn = PlayedTurn(reply.turn, observation, reply.step.reward)
    success = reply.step.info.get("success")
    return played._replace(
        turns=[*played.turns, turn],
        success=None if success is None else float(success),
        failure=reply.failure,
        problem=reply.problem,
    )
