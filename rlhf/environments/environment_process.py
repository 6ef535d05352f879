"""The process in which environments run; see process_pool.py for the other side.

Both sides send lines of JSON: first the configuration and the answer whether it can be used, then
for each call ``{"episode": e, "start": [seed, row]}``, ``{"episode": e, "text": turn}`` or
``{"episode": e, "player": name}`` and the fields of its ``Reply``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf.base.errors import RlhfError
from rlhf.base.isolated_process import serve_lines
from rlhf.base.user_code import failure_reason
from rlhf.config.choices import EnvironmentKind
from rlhf.config.schema.environment import EnvironmentConfig, FailureRewards
from rlhf.environments.factories import environment_factory
from rlhf.environments.interface import EpisodeStart, Player
from rlhf.environments.local_pool import EpisodeEnvironments, facts_of


def serve_environments(descriptor: int) -> None:
    """Answer the calls on the socket until its other end is closed."""
    serve_lines(descriptor, _answers)


def _answers(messages: Iterator[Any]) -> Iterator[dict[str, Any]]:
    given = next(messages, None)
    if given is None:
        return
    try:
        make = environment_factory(_config_of(given))
        facts = facts_of(make())
    except RlhfError as error:
        yield {"error": str(error)}
        return
    except BaseException as error:  # the user's class may raise anything
        yield {"error": f"environment.target={given['target']}: {failure_reason(error, None)}"}
        return
    yield facts._asdict()
    episodes = EpisodeEnvironments(make)
    for call in messages:
        if "start" in call:
            reply = episodes.reset(call["episode"], EpisodeStart(*call["start"]))
        else:
            turn = Player(call["player"]) if "player" in call else call["text"]
            reply = episodes.step(call["episode"], turn)
        yield reply._asdict()


def _config_of(given: dict[str, Any]) -> EnvironmentConfig:
    """Return the configuration that ``asdict`` turned into JSON."""
    kind, rewards = EnvironmentKind(given["kind"]), FailureRewards(**given["failure_rewards"])
    return EnvironmentConfig(**given | {"kind": kind, "failure_rewards": rewards})
