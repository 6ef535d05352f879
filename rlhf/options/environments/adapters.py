"""Adapters of environments in gymnasium, textarena, reasoning_gym and GEM, and their helpers."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from random import Random
from typing import Any, TypeVar

from rlhf.base.errors import ConfigError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.isolated_process import failure_reason
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.options.environments.interface import Environment, Observation, Step
from rlhf.options.environments.keys import EnvironmentKind

T = TypeVar("T")
INSTALL = "pip install 'rlhf[environments]'"


def import_package(kind: EnvironmentKind, module: str, install: str = INSTALL) -> Any:
    """Import the package of an adapter; raise ConfigError if it is missing or fails to import."""
    if find_spec(module) is None:
        raise ConfigError(f"environment.kind={kind}: its package is not installed; {install}")
    with translate_errors(lambda reason: ConfigError(f"environment.kind={kind}: {reason}")):
        return import_module(module)


@contextmanager
def translate_package_errors(id: str) -> Iterator[None]:
    """Turn any error that the package raises into a ConfigError that names ``environment.id``."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # packages raise AssertionError, AttributeError and other errors
        raise ConfigError(
            f"environment.id={id}: its package cannot make it with these environment.options "
            f"({failure_reason(error, None)})"
        ) from error


class SeparateRandomness:
    """A wrapper for an environment that uses Python's and NumPy's global random generators.

    Each episode has its own random state. ``reset`` seeds the state; every call uses it, and
    restores the caller's state afterwards.
    """

    def __init__(self, inner: Environment) -> None:
        self._inner = inner
        self._state: tuple[Any, Any] | None = None

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> Observation | str:
        """Begin an episode with a random state from ``seed``."""

        def seed_and_reset() -> Observation | str:
            _seed_random_state(seed)
            return self._inner.reset(seed=seed, row=row)

        self._state = None
        return self._call_with_own_state(seed_and_reset)

    def step(self, text: str) -> Step:
        """Return the inner environment's answer to a turn, with this episode's random state."""
        return self._call_with_own_state(lambda: self._inner.step(text))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner environment, such as ``optimum`` or ``random_turn``."""
        return getattr(self._inner, name)

    def _call_with_own_state(self, call: Callable[[], T]) -> T:
        callers_state = _get_random_state()
        try:
            if self._state is not None:
                _set_random_state(self._state)
            return call()
        finally:
            self._state = _get_random_state()
            _set_random_state(callers_state)


@contextmanager
def seed_global_random(seed: int) -> Iterator[None]:
    """Seed the global random generators within the context, and restore their state after it."""
    callers_state = _get_random_state()
    _seed_random_state(seed)
    try:
        yield
    finally:
        _set_random_state(callers_state)


def _seed_random_state(seed: int) -> None:
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def _get_random_state() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


INSTALL_GEM = (
    "pip install gem-llm in an environment without 'rlhf[environments]', and rlhf after it: "
    "gem-llm pins other versions of nltk, reasoning-gym and antlr4-python3-runtime, but "
    "runs with Hydra's antlr4"
)
ACTIONS: Mapping[str, list[str]] = read_yaml_beside(__file__, "gymnasium_actions.yaml")
TAXI_PLACES = ("red", "green", "yellow", "blue", "taxi")


class GymnasiumText:
    """An environment of gymnasium with discrete actions and observations, such as "toy text".

    The policy writes the name of an action, and reads observations described in words.
    """

    def __init__(self, id: str, actions: Sequence[str] = (), **options: Any) -> None:
        """Make the environment; ``actions``, if given, are the names of its actions."""
        gymnasium = import_package(EnvironmentKind.gymnasium, "gymnasium")
        with translate_package_errors(id):
            self._env = gymnasium.make(id, **options)
        spaces = gymnasium.spaces
        action_space, observed = self._env.action_space, self._env.observation_space
        parts = observed.spaces if isinstance(observed, spaces.Tuple) else [observed]
        if not all(isinstance(part, spaces.Discrete) for part in [action_space, *parts]):
            raise ConfigError(
                f"environment.id={id}: its actions and observations must be Discrete (observations "
                f"also Tuples of Discrete); they are {action_space} and {observed}"
            )
        self._name, first = self._env.spec.name, int(action_space.start)
        count = int(action_space.n)
        names = list(actions) or ACTIONS.get(self._name, [])
        names = names or [str(first + i) for i in range(count)]
        if len(names) != count:
            raise ConfigError(
                f"environment.options.actions={names}: must name the {count} actions of {id}"
            )
        self._actions = {name: first + i for i, name in enumerate(names)}

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:  # noqa: ARG002 - needs no data
        """Begin an episode; return the names of the actions and the first observation."""
        observation, _ = self._env.reset(seed=seed % 2**32)
        self._seen = self._describe_observation(observation)
        return f"{', '.join(self._actions)}? {self._seen}"

    def step(self, text: str) -> Step:
        """Take the action that the turn names; any other text changes nothing."""
        action = self._actions.get(text.strip())
        if action is None:
            return Step(f"{', '.join(self._actions)}? {self._seen}", info={"malformed": True})
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._seen = self._describe_observation(observation)
        info = {}
        if self._name in ACTIONS:  # a win has a positive reward; CliffWalking's goal has -1
            won = reward > 0 or self._name.startswith("CliffWalking")
            info["success"] = bool(terminated and won)
        return Step(self._seen, float(reward), bool(terminated), bool(truncated), info)

    def random_turn(self, rng: Random) -> str:
        """Return the name of a random action."""
        return rng.choice(list(self._actions))

    def _describe_observation(self, observation: Any) -> str:
        numbers = [
            int(x) for x in (observation if isinstance(observation, tuple) else [observation])
        ]
        if self._name == "Blackjack":
            return f"you {'soft ' if numbers[2] else ''}{numbers[0]} dealer {numbers[1]}"
        if self._name == "Taxi":
            row, column, passenger, goal = self._env.unwrapped.decode(numbers[0])
            places = f"passenger {TAXI_PLACES[passenger]} goal {TAXI_PLACES[goal]}"
            return f"row {row} column {column} {places}"
        if self._name in ACTIONS:
            world = self._env.unwrapped
            columns = world.ncol if hasattr(world, "ncol") else world.shape[1]
            return f"row {numbers[0] // columns} column {numbers[0] % columns}"
        return " ".join(map(str, numbers))


class TextArenaGame:
    """A game of textarena for one player.

    The game's messages become observations; its repetitions of the policy's turns are dropped.
    """

    def __init__(self, id: str, **options: Any) -> None:
        """Make the game; raise ConfigError if one player cannot play it."""
        self._arena = import_package(EnvironmentKind.textarena, "textarena")
        _require_single_player(id, json.dumps(options, sort_keys=True))
        self._game = _make_game(self._arena, id, options)

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:  # noqa: ARG002 - needs no data
        """Begin the game; return its rules and board."""
        self._game.reset(num_players=1, seed=seed)
        return self._read_messages()

    def step(self, text: str) -> Step:
        """Make the move ``text``; only the last step of the game has a reward."""
        done, _ = self._game.step(text)
        state = self._game.state
        if not done:
            return Step(self._read_messages(), info={"malformed": state.error_count > 0})
        rewards, players = self._game.close()
        info = {"success": rewards[0] >= 1, "malformed": bool(players[0]["invalid_move"])}
        return Step(self._read_messages(), reward=float(rewards[0]), terminated=True, info=info)

    def _read_messages(self) -> str:
        repetition = self._arena.core.ObservationType.PLAYER_ACTION
        _, messages = self._game.get_observation()
        return "\n".join(str(text).strip() for _, text, kind in messages if kind is not repetition)


def _make_game(arena: Any, id: str, options: Mapping[str, Any]) -> Any:
    game = arena.make(id, **options)
    while isinstance(game, arena.Wrapper):  # textarena's wrappers repeat the conversation each turn
        game = game.env
    return game


@lru_cache
def _require_single_player(id: str, options: str) -> None:
    """Raise ConfigError if one player cannot begin the game; ``options`` is JSON text."""
    arena = import_package(EnvironmentKind.textarena, "textarena")
    with translate_package_errors(id):
        game = _make_game(arena, id, json.loads(options))
        game.reset(num_players=1, seed=0)
    if not isinstance(game.state, arena.SinglePlayerState):
        raise ConfigError(f"environment.id={id}: must be a game for one player; it needs more")


class ReasoningQuestion:
    """An environment that asks one question of a reasoning_gym generator; one turn answers it.

    The reward is the score of the answer, from 0 to 1. ``optimum`` is 1 if the generator's own
    answer gets the score 1, and otherwise None.
    """

    def __init__(self, id: str, **options: Any) -> None:
        """Raise ConfigError if the generator ``id`` cannot make a question with the options."""
        self._package = import_package(EnvironmentKind.reasoning_gym, "reasoning_gym")
        self._id, self._options = id, options
        with translate_package_errors(id):
            self._make_question(0)
            is_right = self._score(self.demonstration()) == 1
        self.optimum = 1.0 if is_right else None

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:  # noqa: ARG002 - needs no data
        """Return the question that the generator makes from ``seed``."""
        self._make_question(seed % 2**31)
        return str(self._entry["question"])

    def step(self, text: str) -> Step:
        """Return the score of the answer ``text`` as the reward, and end the episode."""
        try:
            score = self._score(text.strip())
        except Exception:  # reasoning_gym's scorers pass on errors of int() and json.loads
            info = {"success": False, "malformed": True}
            return Step("", terminated=True, info=info)
        return Step("", reward=score, terminated=True, info={"success": score >= 1})

    def demonstration(self) -> str:
        """Return the generator's own answer; "" if it has none."""
        return str(self._entry["answer"] or "")

    def _make_question(self, seed: int) -> None:
        # A data set of one row, since some generators build all their rows at once.
        self._data = self._package.create_dataset(self._id, seed=seed, size=1, **self._options)
        self._entry = self._data[0]

    def _score(self, answer: str) -> float:
        return float(self._data.score_answer(answer, self._entry))


class GemText:
    """An environment of GEM (gem-llm), whose observations and actions are texts already."""

    def __init__(self, id: str, **options: Any) -> None:
        """Make the environment; raise ConfigError if GEM cannot make it."""
        gem = import_package(EnvironmentKind.gem, "gem", INSTALL_GEM)
        with translate_package_errors(id):
            self._env = gem.make(id, **options)

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:  # noqa: ARG002 - needs no data
        """Begin an episode; return its instructions."""
        observation, _ = self._env.reset(seed=seed % 2**32)
        return str(observation)

    def step(self, text: str) -> Step:
        """Take the action in the turn's LaTeX box, the form that GEM's instructions require."""
        observation, reward, terminated, truncated, _ = self._env.step(text)
        success = bool(terminated) and float(reward) >= 1
        return Step(
            str(observation), float(reward), bool(terminated), bool(truncated), {"success": success}
        )

    def random_turn(self, rng: Random) -> str:
        """Return a random action; only GEM's games can draw one."""
        with seed_global_random(rng.getrandbits(32)):
            return str(self._env.sample_random_action())
