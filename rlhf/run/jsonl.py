"""Files with one JSON object per line that stay readable if the process is killed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Set
from contextlib import suppress
from io import FileIO
from pathlib import Path

from rlhf.base.atomic import is_transient, replace_atomically, retry_transient_errors
from rlhf.base.errors import CheckpointError
from rlhf.base.finite_numbers import replace_non_finite
from rlhf.base.foreign_errors import remedy_of
from rlhf.base.stored_files import (
    ALARMS,
    METRICS,
    SAMPLES,
    open_regular_file,
    read_json_lines_with_bytes,
)
from rlhf.methods import installed_methods
from rlhf.options.replay.keys import LOG as DIGESTS
from rlhf.options.rollout_log.keys import LOG as ROLLOUTS

OPTIONS_LOGS = (  # names of the logs of options and methods
    ROLLOUTS,
    DIGESTS,
    *(method.log for method in installed_methods() if method.log is not None),
)
LOGS = (METRICS.name, SAMPLES.name, ALARMS.name, *OPTIONS_LOGS)  # rank 0 appends to them
# UTF-8 cannot encode a lone surrogate: it is written as \udXXX, which JSON decodes back.
ENCODING_ERRORS = "backslashreplace"


class JsonlWriter:
    """A writer that appends each record to a file immediately.

    Records that a network drive refuses several times are held, and written with the next record.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = retry_transient_errors(self._open)
        self._size = self._file.tell()  # bytes that were written completely
        self._held = b""
        self.is_late = False  # True while a network drive refuses the held records

    def write(self, record: Mapping[str, object]) -> None:
        """Append one line; a number that is not finite becomes null, since JSON has no NaN.

        Raises:
            CheckpointError: if the drive is full, or cannot be written.
        """
        text = json.dumps(replace_non_finite(record), ensure_ascii=False, allow_nan=False) + "\n"
        self._held += text.encode("utf-8", errors=ENCODING_ERRORS)
        try:
            self._flush_lines() if self.is_late else retry_transient_errors(self._flush_lines)
            self.is_late = False
        except OSError as error:
            self.is_late = is_transient(error)
            if not self.is_late:
                raise CheckpointError(
                    f"{self._path} cannot be written ({error.strerror}). Its lines are intact; "
                    f"{remedy_of(error)}, and resume the run"
                ) from error

    def _open(self) -> FileIO:
        return open(self._path, "ab", buffering=0, opener=open_regular_file)

    def _flush_lines(self) -> None:
        """Write the held bytes; if the last attempt failed, first remove what it wrote."""
        if self._file.closed:
            self._file = self._open()
            self._file.truncate(self._size)
        try:
            unwritten = memoryview(self._held)
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError:
            with suppress(OSError):
                self._file.close()
            raise
        self._size += len(self._held)
        self._held = b""

    def close(self) -> None:
        """Write the held records, if that is possible now, and close the file."""
        with suppress(OSError):
            if self._held:
                self._flush_lines()
        self._file.close()


def truncate_file(path: Path, size: int) -> None:
    """Shorten ``path`` to its first ``size`` bytes, which it had when a checkpoint was written."""
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)


def drop_lines_of_phases(path: Path, unfinished: Set[str]) -> set[str]:
    """Rewrite ``path`` without lines of ``unfinished`` phases and without an incomplete last line.

    Return the phases whose lines were dropped. A resumed run calls this, so that a phase that runs
    again does not appear twice. The file is replaced atomically: a killed process leaves the old
    file intact. A missing file is ignored.

    Raises:
        DamagedFileError: if a complete line is not a JSON object with a phase.
    """
    if not path.exists():
        return set()
    lines = list(read_json_lines_with_bytes(path, {"phase": str}))
    kept = [line for line, value in lines if value["phase"] not in unfinished]
    with replace_atomically(path) as building:
        building.write_bytes(b"".join(line + b"\n" for line in kept))
    return {value["phase"] for _, value in lines} & unfinished
