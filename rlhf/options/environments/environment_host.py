"""A process that runs environments: its calls, their time limit, and replays in a new process."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from rlhf.base.errors import ConfigError
from rlhf.base.isolated_process import SECONDS_TO_START, IsolatedProcess
from rlhf.options.environments.interface import (
    EnvironmentFacts,
    EpisodeStart,
    Observation,
    Player,
    Reply,
    Step,
    build_failure_reply,
)
from rlhf.options.environments.keys import EnvironmentConfig, FailureName

SECONDS_PER_LINE = 1.0  # time limit for the rest of a line whose beginning has arrived


@dataclass
class _History:
    """The turns and answers of an episode so far, with which another process can replay it."""

    start: EpisodeStart
    process: int  # the number (see Host.starts) of the process in which the episode runs
    turns: list[str | Player] = field(default_factory=list)
    answers: list[Step] = field(default_factory=list)


class _Call(NamedTuple):
    """A call of an environment: ``reset`` if ``turn`` is None, otherwise ``step``."""

    episode: int
    history: _History
    turn: str | Player | None = None
    repeats: int | None = None  # in a replay: index of the recorded answer that must come again


class Host:
    """One process and the episodes that run in it; the process runs one call at a time."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self.starts = 0  # number of processes started so far
        self.process: IsolatedProcess | None = None
        self._histories: dict[int, _History] = {}
        self._waiting: deque[_Call] = deque()
        self._running: _Call | None = None
        self._is_ready = False
        self._calls = 0  # number of calls sent to this process
        self.deadline = math.inf  # deadline of the running call, or of the start of the process
        self.facts = EnvironmentFacts()

    @property
    def has_open_calls(self) -> bool:
        """Return True if a call is running or waiting."""
        return self._running is not None or bool(self._waiting)

    def start(self) -> None:
        """Start a process, and send it the configuration without waiting for its answer."""
        self.starts, self._calls, self._is_ready = self.starts + 1, 0, False
        self.process = IsolatedProcess("rlhf.options.environments.process_pool:serve_environments")
        self.deadline = time.monotonic() + SECONDS_TO_START
        with suppress(OSError):  # if sending fails, receiving fails too, and reports the error
            self.process.send(asdict(self._config), self.deadline)

    def wait_until_ready(self) -> None:
        """Wait until the process is ready; raise ConfigError if it ends or refuses its config."""
        assert self.process is not None
        try:
            line = self.process.receive(self.deadline)
        except OSError as error:
            raise ConfigError(
                f"environment.kind={self._config.kind}: its process does not start"
            ) from error
        if "error" in line:
            raise ConfigError(str(line["error"]))
        self.facts = EnvironmentFacts(line["optimum"], tuple(map(Player, line["players"])))
        self._is_ready, self.deadline = True, math.inf

    def begin_episode(self, episode: int, start: EpisodeStart) -> list[Reply]:
        """Begin an episode in place of any of the same number; return replies of failed calls."""
        self._forget_episode(episode)
        history = self._histories[episode] = _History(start, self.starts)
        self._waiting.append(_Call(episode, history))
        return self.send_next_call()

    def send_turn(self, episode: int, turn: str | Player) -> list[Reply]:
        """Send a turn to an episode, or let a player choose it; return replies of failed calls."""
        history = self._histories.get(episode)
        if history is None:
            raise KeyError(f"episode {episode} has not begun, or has ended")
        self._waiting.append(_Call(episode, history, turn))
        return self.send_next_call()

    def send_next_call(self) -> list[Reply]:
        """Send the next call if the process is free; return replies of failed calls."""
        while self._waiting and self._running is None:
            if self.process is None:
                self.start()
            if not self._is_ready:
                return []
            call = self._waiting[0]
            is_elsewhere = call.history.process != self.starts
            if call.turn is not None and call.repeats is None and is_elsewhere:
                self._waiting.extendleft(reversed(_build_replay_calls(call)))
                call.history.process = self.starts
                continue
            self._waiting.popleft()
            if call.turn is None:
                call.history.process = self.starts
            self.deadline = time.monotonic() + self._config.step_seconds
            self._running, self._calls = call, self._calls + 1
            assert self.process is not None
            try:
                self.process.send(_build_message(call), self.deadline)
            except TimeoutError:
                return self._end_process(FailureName.timeout)
            except OSError:
                if self._calls == 1:
                    return self._end_process(FailureName.died)
                self._running = None  # the process ended first, so this call had no effect
                self._waiting.appendleft(call)
                self.close()
        return []

    def receive_replies(self) -> list[Reply]:
        """Read the process's answer; return the reply, if any, and replies of failed calls."""
        assert self.process is not None
        try:
            if not self._is_ready:
                return self._receive_ready_message()
            line = self.process.receive(time.monotonic() + SECONDS_PER_LINE)
            if (call := self._running) is None:
                self.close()  # the line answers no call
                return []
            reply = _parse_reply(line, call.episode)
        except TimeoutError:
            return []
        except (OSError, ValueError, TypeError, KeyError):  # the line is not a reply
            return self._end_process(FailureName.died)
        self._running, self.deadline = None, math.inf
        return [*self._accept_reply(call, reply), *self.send_next_call()]

    def end_if_expired(self) -> list[Reply]:
        """End the process if its deadline has passed; return the failure of its call."""
        return self._end_process(FailureName.timeout) if time.monotonic() >= self.deadline else []

    def close(self) -> None:
        """End the process; keep the waiting calls for the next process."""
        if self.process is not None:
            self.process.close()
        # Drop calls that replay: in the next process, replays begin again from the start.
        self._waiting = deque(call for call in self._waiting if call.repeats is None)
        self.process, self.deadline, self._is_ready = None, math.inf, False

    def _receive_ready_message(self) -> list[Reply]:
        assert self.process is not None
        if "error" in self.process.receive(time.monotonic() + SECONDS_PER_LINE):
            return self._end_process(FailureName.died)
        self._is_ready, self.deadline = True, math.inf
        return self.send_next_call()

    def _accept_reply(self, call: _Call, reply: Reply) -> list[Reply]:
        """Return [reply]; [] if a replay repeated its answer, or the episode has been replaced."""
        if self._histories.get(call.episode) is not call.history:
            return []
        if call.repeats is not None and reply.failure is None:
            if reply.step == call.history.answers[call.repeats]:
                return []
            problem = "it answered differently when it was replayed after another episode's failure"
            reply = build_failure_reply(call.episode, FailureName.invalid, problem)
        if reply.has_ended:
            self._forget_episode(call.episode)
        else:
            call.history.answers.append(reply.step)
            call.history.turns += [] if call.turn is None else [call.turn]
        return [reply]

    def _end_process(self, failure: FailureName) -> list[Reply]:
        """End the process; return the failure of its call, or of all calls if it did not start."""
        seconds = self._config.step_seconds
        problem = f"it took more than {seconds:g} s" if failure is FailureName.timeout else ""
        calls = [] if self._running is None else [self._running]
        if not self._is_ready:
            failure, problem = FailureName.died, "its process could not be restarted"
            calls = list(self._waiting)
        self.close()
        self._running = None
        replies = []
        for call in calls:
            reply = build_failure_reply(call.episode, failure, problem or "its process ended")
            replies += self._accept_reply(call, reply)
        return [*replies, *self.send_next_call()]

    def _forget_episode(self, episode: int) -> None:
        self._histories.pop(episode, None)
        self._waiting = deque(call for call in self._waiting if call.episode != episode)


def _build_replay_calls(call: _Call) -> list[_Call]:
    """Return the calls to replay in a new process before ``call``: reset and all earlier turns."""
    turns = [None, *call.history.turns]
    return [_Call(call.episode, call.history, turn, i) for i, turn in enumerate(turns)]


def _build_message(call: _Call) -> dict[str, Any]:
    if call.turn is None:
        return {"episode": call.episode, "start": call.history.start}
    field_name = "player" if isinstance(call.turn, Player) else "text"
    return {"episode": call.episode, field_name: call.turn}


def _parse_reply(line: Mapping[str, Any], episode: int) -> Reply:
    """Return the reply in a line of JSON; raise ValueError if the line is for another episode."""
    (text, role), *others = line["step"]
    failure = None if line["failure"] is None else FailureName(line["failure"])
    if line["episode"] != episode:
        raise ValueError(f"episode {line['episode']} instead of {episode}")
    step = Step(Observation(text, role), *others)
    return Reply(episode, step, failure, line["problem"], line["turn"])
