"""The pool of a rank: in processes of their own, environments neither stall nor end the run.

A process and its host exchange lines of JSON: first the configuration and the answer whether it can
be used, then for each call ``{"episode": e, "start": [seed, row]}``, ``{"episode": e, "text":
turn}`` or ``{"episode": e, "player": name}`` and the fields of its ``Reply``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import wait as wait_for_any
from typing import Any

from rlhf.base.errors import RlhfError
from rlhf.base.isolated_process import serve_lines
from rlhf.base.user_code import failure_reason
from rlhf.config.choices import EnvironmentKind
from rlhf.config.schema.environment import EnvironmentConfig, FailureRewards
from rlhf.environments.environment_host import Host
from rlhf.environments.factories import environment_factory
from rlhf.environments.interface import EpisodeStart, Player, Reply
from rlhf.environments.local_pool import EpisodeEnvironments, LocalPool, facts_of

LONGEST_WAIT = 1000.0  # seconds; more milliseconds than fit into an int are refused


class ProcessPool:
    """A pool of ``config.processes`` processes; episode e lives in process e modulo their number.

    A call that takes more than ``config.step_seconds`` ends its process, and with it only its own
    episode: the others are replayed in a new process before their next turn.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Start the processes, or none: ConfigError if one cannot make the environment."""
        self._hosts = [Host(config) for _ in range(config.processes)]
        self._failures: list[Reply] = []  # of calls that could not be sent
        try:
            for host in self._hosts:
                host.start()
            for host in self._hosts:
                host.finish_start()
        except BaseException:
            self.close()
            raise
        self.facts = self._hosts[0].facts

    def reset(self, episode: int, *, seed: int, row: Mapping[str, Any]) -> None:
        """Begin the episode with this number, in place of an earlier one."""
        self._failures += self._host(episode).begin(episode, EpisodeStart(seed, row))

    def step(self, episode: int, turn: str | Player) -> None:
        """Give a turn of the policy to an episode, or let a player take it."""
        self._failures += self._host(episode).give(episode, turn)

    def replies(self, *, wait: bool) -> list[Reply]:
        """Return replies since the last call; with ``wait`` at least one, [] if none is due."""
        found, self._failures = self._failures, []
        while True:
            running: dict[Any, Host] = {
                host.process.fileno(): host for host in self._hosts if host.process
            }
            until = min(host.until for host in self._hosts)
            seconds = min(max(until - time.monotonic(), 0.0), LONGEST_WAIT)
            seconds = seconds if wait and not found else 0.0
            is_due = any(host.is_due for host in self._hosts)
            for readable in wait_for_any([*running], seconds if is_due else 0.0):
                found += running[readable].receive()
            for host in self._hosts:
                found += host.expire()
            if found or not wait or not any(host.is_due for host in self._hosts):
                return found

    def close(self) -> None:
        """End all processes."""
        for host in self._hosts:
            host.close()

    def _host(self, episode: int) -> Host:
        return self._hosts[episode % len(self._hosts)]


def build_pool(config: EnvironmentConfig) -> LocalPool | ProcessPool:
    """Return the pool of environments of a rank."""
    if config.processes > 0:
        return ProcessPool(config)
    return LocalPool(environment_factory(config))


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
