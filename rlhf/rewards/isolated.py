"""Compute a part of the score in a process of its own, which cannot hang the run."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from rlhf.config.schema.rewards import RewardPart
from rlhf.errors import ConfigError
from rlhf.rewards.answers import Answers

SECONDS_TO_START = 120.0  # a function's module may import much
CHUNK = 1 << 20  # bytes


class FailureError(Exception):
    """The error for a batch that a part could not score; its message says why in one line."""


class IsolatedReward:
    """A part of the score that a process of its own computes.

    ``ask`` and ``scores`` are separate, so that several parts compute at the same time.
    """

    def __init__(self, name: str, part: RewardPart) -> None:
        """Start the process.

        Raises:
            ConfigError: if the part cannot be used; the message names its key.
        """
        self.name, self.part = name, part
        self.rows = 0  # of the batch that was asked for last
        self._seconds, self._until = 0.0, 0.0  # time limit of this request, and its deadline
        self._not_asked: FailureError | None = None
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlhf.rewards.process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints goes to stderr
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # it is ended with the processes that it starts
            )
        self._channel, self._received = ours, b""
        self._allow(SECONDS_TO_START)
        try:
            self._send(asdict(self.part))
            problem = self._receive().get("error")
        except FailureError as error:
            raise ConfigError(f"rewards.{self.name} does not start: {error}") from error
        if problem is not None:
            self.close()
            raise ConfigError(f"rewards.{self.name}.{problem}")

    def ask(self, answers: Answers) -> None:
        """Send the batch to score."""
        self.rows = len(answers.responses)
        if self._process.poll() is not None:
            self._start()
        self._allow(self.part.timeout_seconds)
        self._not_asked = None
        try:
            self._send(answers._asdict())
        except FailureError as error:
            self._not_asked = error

    def scores(self) -> list[float]:
        """Return the scores of the batch; NaN for a response without a score.

        Raises:
            FailureError: if the part took too long, raised an error, ended or returned anything
                but one number for each response.
        """
        if self._not_asked is not None:
            raise self._not_asked
        answer = self._receive()
        if "error" in answer:
            raise FailureError(str(answer["error"]).partition("\n")[0])
        found: list[float] = answer["scores"]
        if len(found) != self.rows:
            raise FailureError(f"it returned {len(found)} scores for {self.rows} responses")
        return [score if math.isfinite(score) else math.nan for score in found]

    def close(self) -> None:
        """End the process, and those that it started."""
        self._channel.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, content: Mapping[str, Any]) -> None:
        line = json.dumps(content, default=str) + "\n"
        try:
            self._channel.settimeout(self._seconds_left())
            self._channel.sendall(line.encode())
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self) -> Mapping[str, Any]:
        """Return the next line of the process as JSON."""
        try:
            while b"\n" not in self._received:
                self._channel.settimeout(self._seconds_left())
                more = self._channel.recv(CHUNK)
                if not more:
                    raise ConnectionResetError
                self._received += more
        except OSError as error:
            raise self._lost(error) from error
        line, self._received = self._received.split(b"\n", 1)
        answer: Mapping[str, Any] = json.loads(line)
        return answer

    def _allow(self, seconds: float) -> None:
        self._seconds, self._until = seconds, time.monotonic() + seconds

    def _seconds_left(self) -> float:
        return max(self._until - time.monotonic(), 1e-3)

    def _lost(self, error: OSError) -> FailureError:
        """End the process after an error, and return why."""
        self.close()
        if isinstance(error, TimeoutError):
            return FailureError(f"it took more than {self._seconds:g} s")
        return FailureError("its process ended")
