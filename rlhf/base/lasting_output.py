"""Keep a process alive whose terminal, pipe or log file no longer takes what it prints."""

from __future__ import annotations

import io
import os
import sys


class _LastingFile(io.FileIO):
    """A file descriptor that becomes /dev/null when a write to it fails."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int | None:  # type: ignore[override]
        """Write ``data``, or drop it after the first failure; say so on stderr once."""
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # for the libraries and processes that share it too
            os.close(null)
            if self.fileno() != sys.__stderr__.fileno():  # type: ignore[union-attr]
                sys.stderr.write(
                    f"warning: the output cannot be written ({error.strerror}); "
                    "this process continues without it\n"
                )
            return len(data)


def outlast_output() -> None:
    """Let this process go on if stdout or stderr break: `| head`, a full drive, a lost terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # A stream that a test or a notebook has put in its place is not ours to replace.
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        lasting = io.TextIOWrapper(
            io.BufferedWriter(_LastingFile(stream.fileno(), "w", closefd=False)),  # type: ignore[type-var]
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lasting)
        setattr(sys, f"__{name}__", lasting)
