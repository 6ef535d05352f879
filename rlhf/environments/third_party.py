"""Functions shared by the adapters of packages: import, errors, and the state of random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from rlhf.base.errors import ConfigError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.user_code import failure_reason
from rlhf.config.choices import EnvironmentKind
from rlhf.environments.interface import Environment, Observation, Step

T = TypeVar("T")
INSTALL = "pip install 'rlhf[environments]'"


def import_package(kind: EnvironmentKind, module: str, install: str = INSTALL) -> Any:
    """Import the package of an adapter, or raise ConfigError."""
    if find_spec(module) is None:
        raise ConfigError(f"environment.kind={kind}: its package is not installed; {install}")
    with translate_errors(lambda reason: ConfigError(f"environment.kind={kind}: {reason}")):
        return import_module(module)


@contextmanager
def refuse_id(name: str) -> Iterator[None]:
    """Raise a ConfigError that names ``environment.id`` if the package raises any error."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # packages raise AssertionError, AttributeError and what they like
        raise ConfigError(
            f"environment.id={name}: its package cannot make it with these environment.options "
            f"({failure_reason(error, None)})"
        ) from error


class SeparateRandomness:
    """An environment whose code uses Python's and NumPy's global random numbers.

    Each episode has a state of its own: it is seeded by ``reset``, put in place during every call
    and replaced by the caller's state afterwards.
    """

    def __init__(self, inner: Environment) -> None:
        self._inner = inner
        self._state: tuple[Any, Any] | None = None

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> Observation | str:
        """Seed the global random numbers and begin an episode."""

        def begin() -> Observation | str:
            _seed_random_state(seed)
            return self._inner.reset(seed=seed, row=row)

        self._state = None
        return self._with_own_state(begin)

    def step(self, text: str) -> Step:
        """Answer a turn with the random numbers of this episode."""
        return self._with_own_state(lambda: self._inner.step(text))

    def __getattr__(self, name: str) -> Any:
        """Return the inner environment's ``optimum``, ``tools`` and experts."""
        return getattr(self._inner, name)

    def _with_own_state(self, call: Callable[[], T]) -> T:
        others = _random_state()
        try:
            if self._state is not None:
                _set_random_state(self._state)
            return call()
        finally:
            self._state = _random_state()
            _set_random_state(others)


@contextmanager
def global_random(seed: int) -> Iterator[None]:
    """Seed the global random numbers for the block, and restore them after it."""
    others = _random_state()
    _seed_random_state(seed)
    try:
        yield
    finally:
        _set_random_state(others)


def _seed_random_state(seed: int) -> None:
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def _random_state() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])
