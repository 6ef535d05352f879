"""The interface of environments: text in, text out, in gymnasium's form; and checks of it.

An environment is any class with ``reset`` and ``step``. It knows no tokenizer, model or rank. An
episode is one conversation: ``reset``, then a ``step`` for every turn of the policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from numbers import Real
from typing import Any, NamedTuple, Protocol

from rlhf.base.finite_numbers import float_or_infinity
from rlhf.base.isolated_process import failure_reason
from rlhf.config.schema.keys import LARGEST_SCORE
from rlhf.options.environments.keys import FailureName


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


LONGEST_TEXT = 10**6  # characters of an observation, and of an info as JSON
ROLES = ("user", "tool")
FIELDS = len(Step._fields)


class InvalidAnswerError(Exception):
    """An answer that is no observation or no step; its message says why in one line."""


def reply_of(episode: int, call: Callable[[], Step]) -> Reply:
    """Return the reply that a call of an environment gives, a failure included."""
    try:
        return Reply(episode, call())
    except InvalidAnswerError as error:
        return failed(episode, FailureName.invalid, str(error))
    except (Exception, SystemExit) as error:
        return failed(episode, FailureName.exception, failure_reason(error, None))


def failed(episode: int, failure: FailureName, problem: str) -> Reply:
    """Return the reply for a call that failed; its step has no content."""
    return Reply(episode, Step(Observation("")), failure, problem)


def checked_observation(answer: Any) -> Observation:
    """Return what ``reset`` or a step returned as an observation, or raise InvalidAnswerError."""
    found = as_observation(answer)
    if not isinstance(found.text, str):
        kind = type(found.text).__name__
        raise InvalidAnswerError(f"the observation is a {kind}: must be a str or an Observation")
    if found.role not in ROLES:
        raise InvalidAnswerError(
            f"the role of the observation is {found.role!r:.40}: must be in {ROLES}"
        )
    if len(found.text) > LONGEST_TEXT:
        raise InvalidAnswerError(
            f"the observation has {len(found.text)} characters > {LONGEST_TEXT}"
        )
    try:
        found.text.encode()
    except UnicodeEncodeError as error:  # half of a character, which no tokenizer takes
        raise InvalidAnswerError("the observation is no Unicode text") from error
    return found


def checked_step(answer: Any) -> Step:
    """Return what ``step`` returned, or raise InvalidAnswerError; gymnasium's tuple will do."""
    if not isinstance(answer, tuple) or isinstance(answer, Observation):
        raise InvalidAnswerError(f"step returned a {type(answer).__name__}: must be a Step")
    if not 1 <= len(answer) <= FIELDS:
        raise InvalidAnswerError(f"step returned {len(answer)} values: must be a Step")
    step = Step(*answer)
    reward = step.reward
    if isinstance(reward, bool) or not isinstance(reward, Real):
        raise InvalidAnswerError(f"the reward is a {type(reward).__name__}: must be a number")
    if not abs(value := float_or_infinity(reward)) <= LARGEST_SCORE:
        raise InvalidAnswerError(f"the reward is {value}: must be a finite number up to 1e15")
    for name in ("terminated", "truncated"):
        if not _is_bool(getattr(step, name)):
            kind = type(getattr(step, name)).__name__
            raise InvalidAnswerError(f"{name} is a {kind}: must be True or False")
    return Step(
        checked_observation(step.observation),
        value,
        bool(step.terminated),
        bool(step.truncated),
        _checked_info(step.info),
    )


def _checked_info(info: Any) -> dict[str, Any]:
    """Return an info as the JSON that it becomes between processes."""
    if not isinstance(info, Mapping):
        raise InvalidAnswerError(f"info is a {type(info).__name__}: must be a dict")
    found = dict(info)
    for name in {"success", "malformed"} & found.keys():
        if not _is_bool(found[name]):
            raise InvalidAnswerError(
                f"info[{name!r}] is {found[name]!r:.40}: must be True or False"
            )
        found[name] = bool(found[name])
    line = json.dumps(found, default=str, skipkeys=True)
    if len(line) > LONGEST_TEXT:
        raise InvalidAnswerError(f"info has {len(line)} characters > {LONGEST_TEXT}")
    return dict(json.loads(line))


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"  # or NumPy's


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
