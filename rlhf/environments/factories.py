"""Make the environment that a configuration names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rlhf.base.errors import ConfigError
from rlhf.base.user_code import import_user_object
from rlhf.config.choices import EnvironmentKind
from rlhf.config.rules.environment import check_environment_keys
from rlhf.config.schema.environment import EnvironmentConfig
from rlhf.environments.adapters import GemText, GymnasiumText, ReasoningQuestion, TextArenaGame
from rlhf.environments.embedded import Blackjack, Calculator, NumberGuessing
from rlhf.environments.interface import Environment
from rlhf.environments.third_party import SeparateRandomness, global_random
from rlhf.environments.tools import ToolEnvironment, has_tools

EMBEDDED: dict[EnvironmentKind, Callable[..., Environment]] = {
    EnvironmentKind.number_guessing: NumberGuessing,
    EnvironmentKind.calculator: Calculator,
    EnvironmentKind.blackjack: Blackjack,
}
ADAPTERS: dict[EnvironmentKind, Callable[..., Environment]] = {
    EnvironmentKind.gymnasium: GymnasiumText,
    EnvironmentKind.textarena: TextArenaGame,
    EnvironmentKind.reasoning_gym: ReasoningQuestion,
    EnvironmentKind.gem: GemText,
}


def environment_factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Return a function that makes environments; the code of a user is imported only once."""
    kind = config.kind
    if not config.is_used:
        raise ConfigError(f"environment.kind={kind}: there is no environment to make")
    check_environment_keys(config)
    if kind in EMBEDDED:
        return lambda: _made(f"environment.kind={kind}", EMBEDDED[kind], config)
    if kind in ADAPTERS:
        key = f"environment.id={config.id}"
        return lambda: SeparateRandomness(_made(key, ADAPTERS[kind], config, id=config.id))
    return _factory_of_user(config)


def _factory_of_user(config: EnvironmentConfig) -> Callable[[], Environment]:
    found, _ = import_user_object("environment.target", str(config.target))
    key = f"environment.target={config.target}"
    if not inspect.isclass(found):
        raise ConfigError(f"{key}: must be a class, such as my_games:Chess")
    has_steps = callable(getattr(found, "reset", None)) and callable(getattr(found, "step", None))
    if config.kind is EnvironmentKind.custom and has_steps:
        return lambda: SeparateRandomness(_made(key, found, config))
    if not has_tools(found):
        form = "reset(self, **row) and a public method for each tool"
        if config.kind is EnvironmentKind.custom:
            form = f"reset(self, *, seed, row) and step(self, text), or {form}"
        raise ConfigError(f"{key}: must have the methods {form}")
    return lambda: SeparateRandomness(ToolEnvironment(_made(key, found, config)))


def _made(key: str, made: Callable[..., Any], config: EnvironmentConfig, **more: Any) -> Any:
    """Call a class with ``environment.options``, after a check that it takes them.

    Numbers that its constructor draws are the same for every episode.
    """
    try:
        inspect.signature(made).bind(**more, **config.options)
    except TypeError as error:
        raise ConfigError(
            f"environment.options={config.options}: {key} does not take them ({error}); it takes "
            f"{inspect.signature(made)}"
        ) from error
    with global_random(0):
        return made(**more, **config.options)
