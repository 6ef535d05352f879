"""Read the new lines of a file that another process, perhaps on another machine, appends to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.stored_files import DamagedFileError, Form, parse_json, read_bytes

TAIL = 256  # bytes before the place that was read to, which must not have changed


class NewLines(NamedTuple):
    """The values of new lines; ``is_restarted``: those of earlier reads no longer count."""

    values: list[Any]
    is_restarted: bool


class GrowingFile:
    """A JSONL file that is read line by line while it grows.

    Only bytes are compared, since locks and events do not work on every shared file system. A last
    line without an end is left for the next read. A file that was cut or replaced, as by a resumed
    run, is read again from its start. ``fault`` is the message about the first damaged line.
    """

    def __init__(self, path: Path, form: Form) -> None:
        self._path, self._form = path, form
        self._start_again()

    def _start_again(self) -> None:
        self._place = 0  # bytes that were read
        self._tail = b""  # the last of these bytes
        self._num_lines = 0
        self.fault: str | None = None

    def read(self) -> NewLines:
        """Return the values of the complete lines since the last read; no file: no lines."""
        content = self._read_from(self._place - len(self._tail))
        is_restarted = not content.startswith(self._tail)
        if is_restarted:
            self._start_again()
            content = self._read_from(0)
        new = content[len(self._tail) : content.rfind(b"\n") + 1]
        self._place += len(new)
        self._tail = (self._tail + new)[-TAIL:]
        return NewLines(
            [v for line in new.split(b"\n")[:-1] for v in self._parse(line)], is_restarted
        )

    def _read_from(self, start: int) -> bytes:
        try:
            return read_bytes(self._path, start=start) or b""
        except DamagedFileError as error:  # a link, or no file
            self.fault = str(error)
            return b""

    def _parse(self, line: bytes) -> list[Any]:
        """Return the value of a line in a list, which is empty for an empty or damaged line."""
        self._num_lines += 1
        try:
            place = f"line {self._num_lines}: "
            return [parse_json(self._path, line, self._form, place)] if line else []
        except DamagedFileError as error:
            self.fault = self.fault or str(error)
            return []
