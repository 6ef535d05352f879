"""Adapter of the environments of GEM (gem-llm), which have gymnasium's form over text already."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from rlhf.config.choices import EnvironmentKind
from rlhf.environments.interface import Step
from rlhf.environments.third_party import global_random, import_package, refuse_id

INSTALL_GEM = (
    "pip install gem-llm in an environment without 'rlhf[environments]', and rlhf after it: "
    "gem-llm pins other versions of nltk, reasoning-gym and antlr4-python3-runtime, but "
    "runs with Hydra's antlr4"
)


class GemText:
    """An environment of GEM."""

    def __init__(self, id: str, **options: Any) -> None:
        """Make the environment.

        Raises:
            ConfigError: if it cannot be made.
        """
        gem = import_package(EnvironmentKind.gem, "gem", INSTALL_GEM)
        with refuse_id(id):
            self._env = gem.make(id, **options)

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:  # noqa: ARG002 - needs no data
        """Begin an episode; return its instructions."""
        observation, _ = self._env.reset(seed=seed % 2**32)
        return str(observation)

    def step(self, text: str) -> Step:
        """Do the action that the turn holds in a box, as the instructions say."""
        observation, reward, terminated, truncated, _ = self._env.step(text)
        success = bool(terminated) and float(reward) >= 1
        return Step(
            str(observation), float(reward), bool(terminated), bool(truncated), {"success": success}
        )

    def random_turn(self, rng: Random) -> str:
        """Return a random action, which GEM has for its games."""
        with global_random(rng.getrandbits(32)):
            return str(self._env.sample_random_action())
