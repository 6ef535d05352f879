"""Adapter of textarena's games for one player."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rlhf.base.errors import ConfigError
from rlhf.config.choices import EnvironmentKind
from rlhf.environments.interface import Step
from rlhf.environments.third_party import import_package, refuse_id


class TextArenaGame:
    """A game; its messages become observations, without the turns that the policy wrote."""

    def __init__(self, id: str, **options: Any) -> None:
        """Make the game.

        Raises:
            ConfigError: if it cannot be made, or is not for one player.
        """
        self._arena = import_package(EnvironmentKind.textarena, "textarena")
        _check_game(id, json.dumps(options, sort_keys=True))
        self._game = _make_game(self._arena, id, options)

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:  # noqa: ARG002 - needs no data
        """Begin the game; return its rules and board."""
        self._game.reset(num_players=1, seed=seed)
        return self._messages()

    def step(self, text: str) -> Step:
        """Make a move; the reward comes at the end."""
        done, _ = self._game.step(text)
        state = self._game.state
        if not done:
            return Step(self._messages(), info={"malformed": state.error_count > 0})
        rewards, players = self._game.close()
        info = {"success": rewards[0] >= 1, "malformed": bool(players[0]["invalid_move"])}
        return Step(self._messages(), reward=float(rewards[0]), terminated=True, info=info)

    def _messages(self) -> str:
        own = self._arena.core.ObservationType.PLAYER_ACTION
        _, messages = self._game.get_observation()
        return "\n".join(str(text).strip() for _, text, kind in messages if kind is not own)


def _make_game(arena: Any, id: str, options: Mapping[str, Any]) -> Any:
    game = arena.make(id, **options)
    while isinstance(game, arena.Wrapper):  # wrappers repeat the whole conversation in every turn
        game = game.env
    return game


@lru_cache
def _check_game(id: str, options: str) -> None:
    """Check that the game can be made and begun for one player; ``options`` is JSON.

    Raises:
        ConfigError: if it cannot.
    """
    arena = import_package(EnvironmentKind.textarena, "textarena")
    with refuse_id(id):
        game = _make_game(arena, id, json.loads(options))
        game.reset(num_players=1, seed=0)
    if not isinstance(game.state, arena.SinglePlayerState):
        raise ConfigError(f"environment.id={id}: must be a game for one player; it has others too")
