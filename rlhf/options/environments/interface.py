"""The interface of environments (gymnasium's, but with texts), and checks of what they return.

An environment is any class with ``reset`` and ``step``. It has no access to tokenizer, model or
rank. An episode is one conversation: ``reset``, then a ``step`` for every turn of the policy.
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
    """A text from the environment, which the policy reads before its next turn."""

    text: str
    role: str = "user"  # the speaker's role in the chat template: user or tool


def make_observation(given: Observation | str) -> Observation:
    """Return ``given`` as an observation; a plain text gets the role user."""
    return given if isinstance(given, Observation) else Observation(given)


class Step(NamedTuple):
    """An environment's answer to a turn of the policy."""

    observation: Observation | str  # the observation is ignored if this step ends the episode
    reward: float = 0.0
    terminated: bool = False  # the task has ended, so no further reward was possible
    truncated: bool = False  # the episode is cut before the end of its task
    info: Mapping[str, Any] = {}
    """``success`` (bool) is averaged over episodes; ``malformed`` (bool) marks a turn that the
    environment could not read, such as a tool call that is not JSON."""


class Environment(Protocol):
    """A task that the policy performs in turns, one episode at a time.

    Two episodes with equal seed, row and turns must have equal observations and rewards.
    """

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> Observation | str:
        """Begin an episode; ``row`` holds the columns of a row of the data, or is {}."""

    def step(self, text: str) -> Step:
        """Return the environment's answer to ``text``, a turn of the policy."""

    # Optional attribute ``optimum: float``: the largest expected return.
    # Optional method ``demonstration()``: returns an expert's next turn, which SFT learns from.
    # Optional method ``random_turn(rng)``: returns a random valid turn, for result.json.


class EpisodeStart(NamedTuple):
    """The arguments of ``reset``: the seed of the episode, and the columns of its row of data."""

    seed: int
    row: Mapping[str, Any] = {}


Player = StrEnum("Player", "expert random")
"""Players that an environment may have, which write turns in place of the policy."""


class EnvironmentFacts(NamedTuple):
    """Facts about an environment: its largest expected return, and the players that it has."""

    optimum: float | None = None
    players: tuple[Player, ...] = ()


class Reply(NamedTuple):
    """A pool's answer to one call of an episode: an observation, a step, or a failure."""

    episode: int
    step: Step  # in a reply to ``reset``, only the observation is set
    failure: FailureName | None = None
    problem: str = ""  # description of the failure in one line
    turn: str = ""  # the text of the turn, if a player chose it

    @property
    def has_ended(self) -> bool:
        """Return True if the episode ends with this reply."""
        return self.failure is not None or self.step.terminated or self.step.truncated

    @property
    def observation(self) -> Observation:
        """Return the observation of the step."""
        return make_observation(self.step.observation)


class EnvironmentPool(Protocol):
    """A pool that plays many episodes; ``replies`` returns the replies to earlier calls."""

    facts: EnvironmentFacts

    def reset(self, episode: int, *, seed: int, row: Mapping[str, Any]) -> None:
        """Begin an episode without waiting; it replaces an earlier episode of the same number."""

    def step(self, episode: int, turn: str | Player) -> None:
        """Send the policy's turn to an episode, or let a player of the environment choose the turn.

        Raises:
            KeyError: if the episode has not begun, or has ended.
        """

    def replies(self, *, wait: bool) -> list[Reply]:
        """Return new replies; with ``wait``, at least one, unless all calls have been answered."""

    def close(self) -> None:
        """End all episodes, and the processes of the pool."""


LONGEST_TEXT = 10**6  # maximum number of characters of an observation, and of ``info`` as JSON
ROLES = ("user", "tool")
NUM_FIELDS = len(Step._fields)


class InvalidAnswerError(Exception):
    """An invalid answer of an environment; the message gives the reason in one line."""


def call_environment(episode: int, call: Callable[[], Step]) -> Reply:
    """Run ``call``; return a reply with its step, or with the failure if ``call`` raises."""
    try:
        return Reply(episode, call())
    except InvalidAnswerError as error:
        return build_failure_reply(episode, FailureName.invalid, str(error))
    except (Exception, SystemExit) as error:
        return build_failure_reply(episode, FailureName.exception, failure_reason(error, None))


def build_failure_reply(episode: int, failure: FailureName, problem: str) -> Reply:
    """Return the reply for a call that failed; the step of the reply is empty."""
    return Reply(episode, Step(Observation("")), failure, problem)


def parse_observation(answer: Any) -> Observation:
    """Return ``answer`` as an observation, or raise InvalidAnswerError."""
    observation = make_observation(answer)
    if not isinstance(observation.text, str):
        actual = type(observation.text).__name__
        raise InvalidAnswerError(f"the observation is a {actual}: must be a str or an Observation")
    if observation.role not in ROLES:
        raise InvalidAnswerError(
            f"the role of the observation is {observation.role!r:.40}: must be in {ROLES}"
        )
    if len(observation.text) > LONGEST_TEXT:
        raise InvalidAnswerError(
            f"the observation has {len(observation.text)} characters > {LONGEST_TEXT}"
        )
    try:
        observation.text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair in a text, which no tokenizer takes
        raise InvalidAnswerError("the observation is not valid Unicode") from error
    return observation


def parse_step(answer: Any) -> Step:
    """Return the answer of ``step`` as a Step, or raise InvalidAnswerError.

    A plain tuple of the fields of a Step, in order, is accepted too, as gymnasium returns it.
    """
    if not isinstance(answer, tuple) or isinstance(answer, Observation):
        raise InvalidAnswerError(f"step returned a {type(answer).__name__}: must be a Step")
    if not 1 <= len(answer) <= NUM_FIELDS:
        raise InvalidAnswerError(f"step returned {len(answer)} values: must be a Step")
    step = Step(*answer)
    reward = step.reward
    if isinstance(reward, bool) or not isinstance(reward, Real):
        raise InvalidAnswerError(f"the reward is a {type(reward).__name__}: must be a number")
    if not abs(value := float_or_infinity(reward)) <= LARGEST_SCORE:
        raise InvalidAnswerError(f"the reward is {value}: must be a finite number up to 1e15")
    for name in ("terminated", "truncated"):
        if not _is_bool(getattr(step, name)):
            actual = type(getattr(step, name)).__name__
            raise InvalidAnswerError(f"{name} is a {actual}: must be True or False")
    return Step(
        parse_observation(step.observation),
        value,
        bool(step.terminated),
        bool(step.truncated),
        _parse_info(step.info),
    )


def _parse_info(info: Any) -> dict[str, Any]:
    """Check ``info``; return it after a round trip through JSON, as if another process sent it."""
    if not isinstance(info, Mapping):
        raise InvalidAnswerError(f"info is a {type(info).__name__}: must be a dict")
    parsed = dict(info)
    for name in {"success", "malformed"} & parsed.keys():
        if not _is_bool(parsed[name]):
            raise InvalidAnswerError(
                f"info[{name!r}] is {parsed[name]!r:.40}: must be True or False"
            )
        parsed[name] = bool(parsed[name])
    line = json.dumps(parsed, default=str, skipkeys=True)
    if len(line) > LONGEST_TEXT:
        raise InvalidAnswerError(f"info has {len(line)} characters > {LONGEST_TEXT}")
    return dict(json.loads(line))


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"  # NumPy's bool


EPISODES_AT_ONCE = 256  # number of episodes that are played at the same time


class PlayedTurn(NamedTuple):
    """A turn of a player, and the environment's answer to it."""

    text: str
    observation: Observation | None  # None if the episode has ended
    reward: float


class PlayedEpisode(NamedTuple):
    """An episode that a player has played, up to its end or to a ``failure``."""

    first: Observation
    turns: list[PlayedTurn]
    success: float | None
    failure: FailureName | None
    problem: str

    @property
    def total_reward(self) -> float:
        """Return the sum of the rewards."""
        return sum(turn.reward for turn in self.turns)


def play_episodes(
    pool: EnvironmentPool, starts: Sequence[EpisodeStart], *, player: Player | None, max_turns: int
) -> list[PlayedEpisode]:
    """Play one episode for each of ``starts``; if ``player`` is None, only begin the episodes."""
    episodes: list[PlayedEpisode] = []
    for begin in range(0, len(starts), EPISODES_AT_ONCE):
        batch = starts[begin : begin + EPISODES_AT_ONCE]
        played: dict[int, PlayedEpisode] = {}
        for episode, start in enumerate(batch):
            pool.reset(episode, seed=start.seed, row=start.row)
        open_episodes = set(range(len(batch)))
        while open_episodes:
            for reply in pool.replies(wait=True):
                played[reply.episode] = _add_reply(played.get(reply.episode), reply)
                turns = len(played[reply.episode].turns)
                if player is None or reply.has_ended or turns == max_turns:
                    open_episodes.discard(reply.episode)
                else:
                    pool.step(reply.episode, player)
        episodes += [played[episode] for episode in range(len(batch))]
    return episodes


def _add_reply(played: PlayedEpisode | None, reply: Reply) -> PlayedEpisode:
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
