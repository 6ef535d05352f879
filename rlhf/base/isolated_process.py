"""A process for a user's code: it exchanges lines of JSON with the run, and ends with the run.

Both sides send one line of JSON for each message. The code's own output goes to stderr.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf.base.errors import ConfigError

SECONDS_TO_START = 120.0  # the user's code may import large libraries
SECONDS_TO_END = 10.0
CHUNK_BYTES = 1 << 20
LONGEST_LINE_BYTES = 1 << 26
LEAST_READ_S = 1.0  # data that has arrived is read for this time, even if the deadline has passed


class IsolatedProcess:
    """A process that runs MODULE:FUNCTION; the function answers messages by ``serve_messages``."""

    def __init__(self, function: str) -> None:
        run_end, process_end = socket.socketpair()
        arguments = [function, process_end.fileno(), os.getpid()]
        with process_end:
            self._process = subprocess.Popen(
                # -P: a file json.py in the current directory must not replace Python's json.
                [sys.executable, "-P", "-m", "rlhf.base.supervisor", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=2,
                # Sets have the same order in every process, so that an episode can be replayed.
                env={"PYTHONHASHSEED": "0", **os.environ},
                pass_fds=[process_end.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the run, which then ends this process
            )
        self._channel, self._received = run_end, bytearray()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the process has sent something."""
        return self._channel.fileno()

    def has_ended(self) -> bool:
        """Return True if the process has ended."""
        return self._process.poll() is not None

    def send(self, content: Mapping[str, Any], until: float) -> None:
        """Send ``content`` as one line; ``until`` is a deadline on the monotonic clock in seconds.

        Raises:
            TimeoutError: if the process has not read the line at the deadline.
            OSError: if the process has ended.
        """
        self._channel.settimeout(_seconds_until(until))
        self._channel.sendall((json.dumps(content, default=str) + "\n").encode())

    def receive(self, until: float) -> Mapping[str, Any]:
        """Return the next message of the process, a JSON object in one line.

        Raises:
            TimeoutError: if the line is incomplete at the deadline; the next call reads the rest.
            OSError: if the process has ended, or its line is too long or no JSON object.
        """
        last, end = max(until, time.monotonic() + LEAST_READ_S), self._received.find(b"\n")
        while end < 0:
            self._channel.settimeout(_seconds_until(until))
            chunk = self._channel.recv(CHUNK_BYTES)
            if not chunk or len(self._received) > LONGEST_LINE_BYTES:
                raise ConnectionResetError
            if b"\n" in chunk:
                end = len(self._received) + chunk.index(b"\n")
            self._received += chunk
            if end < 0 and time.monotonic() > last:  # data keeps coming without a line end
                raise TimeoutError
        line = self._received[:end]
        del self._received[: end + 1]
        try:
            answer: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConnectionResetError from error
        if not isinstance(answer, dict):
            raise ConnectionResetError
        return answer

    def close(self) -> None:
        """End the process, and all processes that it started."""
        self._channel.close()
        self._process.terminate()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:  # the supervisor waits for an unkillable process
            self._process.kill()
            self._process.wait()


def _seconds_until(until: float) -> float:
    return max(until - time.monotonic(), 1e-3)


def serve_messages(
    descriptor: int, answer_messages: Callable[[Iterator[Any]], Iterable[Mapping[str, Any]]]
) -> None:
    """Pass messages of a socket to ``answer_messages``; send its answers until the peer closes."""
    # Ignore an OSError: the run has ended, or the user's code has closed the socket.
    with (
        suppress(OSError),
        socket.socket(fileno=descriptor) as channel,
        channel.makefile("r") as received,
        channel.makefile("w") as sent,  # one file for both could lose received lines
    ):
        process_id = os.getpid()
        for answer in answer_messages(map(json.loads, received)):
            if os.getpid() != process_id:
                os._exit(1)  # a fork made by the user's code must not answer too
            sent.write(json.dumps(answer, default=str) + "\n")
            sent.flush()


LONGEST_REASON = 500  # characters of an error message, which may quote a whole response


def import_user_object(key: str, target: str) -> tuple[Any, str | None]:
    """Return the object that ``target`` (MODULE:NAME) names, and its module's file, or None.

    The import path is changed: call this function only in a process for a user's code.

    Raises:
        ConfigError: if the object cannot be imported; the message begins with ``key``.
    """
    module, _, name = target.partition(":")
    os.environ.pop("PYTHONSAFEPATH", None)  # else programs that the user's code starts inherit it
    file = None
    try:
        sys.path.append(os.getcwd())  # last, so that a json.py there does not hide Python's json
        spec = find_spec(module)
        file = None if spec is None else spec.origin
        return getattr(import_module(module), name), file
    except BaseException as error:  # the module's own code may raise anything
        raise ConfigError(
            f"{key}={target}: cannot be imported: {failure_reason(error, file)}. Give MODULE:NAME "
            "that can be imported from the current folder"
        ) from error


def find_code_file(target: str) -> Path:
    """Return the path of MODULE.py for MODULE:NAME, without an import; the file may be missing."""
    parts = target.partition(":")[0].split(".")
    paths = [Path(folder, *parts[:-1], f"{parts[-1]}.py") for folder in ("", *sys.path)]
    return next((path for path in paths if path.is_file()), paths[0])


def failure_reason(error: BaseException, file: str | None) -> str:
    """Return ``error`` in one line, with the number of the failed line in the user's ``file``."""
    lines = (line.strip() for line in str(error).splitlines())  # may begin with a row of stars
    first_line = next((line for line in lines if any(map(str.isalnum, line))), "")
    reason = f"{type(error).__name__}: {first_line[:LONGEST_REASON]}".removesuffix(": ")
    frames = traceback.walk_tb(error.__traceback__)
    line_numbers = [str(line) for frame, line in frames if frame.f_code.co_filename == file]
    return f"{reason} ({':'.join([file, *line_numbers[-1:]])})" if file else reason
