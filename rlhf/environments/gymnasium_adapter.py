"""Adapter of gymnasium's environments with discrete actions and observations, such as toy text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from rlhf.base.errors import ConfigError
from rlhf.config.choices import EnvironmentKind
from rlhf.environments.interface import Step
from rlhf.environments.third_party import import_package, refuse_id

MOVES_OF_LAKE, MOVES_OF_CLIFF = "left down right up", "up right down left"
ACTIONS = {
    "Blackjack": "stick hit",
    "FrozenLake": MOVES_OF_LAKE,
    "FrozenLake8x8": MOVES_OF_LAKE,
    "CliffWalking": MOVES_OF_CLIFF,
    "CliffWalkingSlippery": MOVES_OF_CLIFF,
    "Taxi": "south north east west pickup dropoff",
}
TAXI_PLACES = ("red", "green", "yellow", "blue", "taxi")


class GymnasiumText:
    """An environment whose actions have names and whose observations are described in words."""

    def __init__(self, id: str, actions: Sequence[str] = (), **options: Any) -> None:
        """Make the environment; ``actions`` names the actions of one that is not toy text.

        Raises:
            ConfigError: if it cannot be made, or has no discrete actions and observations.
        """
        gymnasium = import_package(EnvironmentKind.gymnasium, "gymnasium")
        with refuse_id(id):
            self._env = gymnasium.make(id, **options)
        spaces = gymnasium.spaces
        seen = self._env.observation_space
        parts = seen.spaces if isinstance(seen, spaces.Tuple) else [seen]
        if not all(isinstance(part, spaces.Discrete) for part in [self._env.action_space, *parts]):
            raise ConfigError(
                f"environment.id={id}: its actions and observations must be Discrete (observations "
                f"also Tuples of Discrete); they are {self._env.action_space} and {seen}"
            )
        self._name, first = self._env.spec.name, int(self._env.action_space.start)
        count = int(self._env.action_space.n)
        names = list(actions) or ACTIONS.get(self._name, "").split()
        names = names or [str(first + i) for i in range(count)]
        if len(names) != count:
            raise ConfigError(
                f"environment.options.actions={names}: environment.id={id} has {count} actions"
            )
        self._actions = {name: first + i for i, name in enumerate(names)}

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:  # noqa: ARG002 - needs no data
        """Begin an episode; return the names of the actions and the first observation."""
        observation, _ = self._env.reset(seed=seed % 2**32)
        self._seen = self._describe(observation)
        return f"{', '.join(self._actions)}? {self._seen}"

    def step(self, text: str) -> Step:
        """Do the action that the turn names; any other text changes nothing."""
        action = self._actions.get(text.strip())
        if action is None:
            return Step(f"{', '.join(self._actions)}? {self._seen}", info={"malformed": True})
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._seen = self._describe(observation)
        info = {}
        if self._name in ACTIONS:  # only the goal ends a walk along the cliff, with reward -1
            won = reward > 0 or self._name.startswith("CliffWalking")
            info["success"] = bool(terminated and won)
        return Step(self._seen, float(reward), bool(terminated), bool(truncated), info)

    def random_turn(self, rng: Random) -> str:
        """Return the name of any action."""
        return rng.choice(list(self._actions))

    def _describe(self, observation: Any) -> str:
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
