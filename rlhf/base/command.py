"""Parsers, exit codes and output that survives errors, for the commands ``python -m rlhf.NAME``."""

from __future__ import annotations

import argparse
import io
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable

from rlhf.base.errors import USER_ERROR, RlhfError
from rlhf.base.foreign_errors import convert_drive_errors
from rlhf.base.safe_text import sanitize_for_terminal


def build_command_parser(
    module: str, description: str | None, *, runs_code: bool = False
) -> argparse.ArgumentParser:
    """Return a parser for ``python -m MODULE``, which keeps the line breaks of ``description``.

    With ``runs_code`` the command has the option --trust-code: the user agrees to run a run's code.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if runs_code:
        text = "run the code that the run's config.yaml names: a model's, environment's or reward's"
        parser.add_argument("--trust-code", action="store_true", help=text)
    return parser


def run_to_exit_code(work: Callable[[], int | None]) -> int:
    """Call ``work`` and return its exit code; print an RlhfError that it raises, and return 2."""
    survive_output_errors()
    set_cuda_allocator()
    try:
        with convert_drive_errors():
            return work() or 0
    except RlhfError as error:
        sys.stderr.write(f"error: {sanitize_for_terminal(str(error))}\n")
        return USER_ERROR


def set_cuda_allocator() -> None:
    """Make torch's GPU allocator use expandable segments, unless the user has configured it.

    Micro-batches of many widths leave unusable gaps in segments of fixed size. Torch reads the
    environment variable only when CUDA starts: call this function before that.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the variable's older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def wait_for_exit(process: subprocess.Popen[bytes]) -> int:
    """Wait for ``process`` and return its exit code.

    Ctrl-C interrupts ``process`` too: KeyboardInterrupt is raised once ``process`` has ended.
    """
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()  # the process may have to end ranks on other nodes first
        raise


class _LastingFile(io.FileIO):
    """A file whose descriptor is redirected to /dev/null as soon as a write fails."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int | None:  # type: ignore[override]
        """Write ``data``; after the first failure drop all output, with one warning on stderr."""
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # redirects output of libraries and child processes too
            os.close(null)
            if self.fileno() != sys.__stderr__.fileno():  # type: ignore[union-attr]
                sys.stderr.write(
                    f"warning: the output cannot be written ({error.strerror}); "
                    "this process continues without it\n"
                )
            return len(data)


def survive_output_errors() -> None:
    """Keep this process running if stdout or stderr closes (`| head`) or its drive is full."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # Do not replace a stream that a test or a notebook has installed.
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        lasting = io.TextIOWrapper(
            io.BufferedWriter(_LastingFile(stream.fileno(), "w", closefd=False)),  # type: ignore[type-var]
            encoding=stream.encoding,
            # Print an escape for a character that the terminal cannot encode, instead of failing.
            errors="backslashreplace" if stream.errors == "strict" else stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lasting)
        setattr(sys, f"__{name}__", lasting)


def quieten_libraries() -> None:
    """Keep the libraries' progress bars and notices off the terminal; errors are still shown."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Hide setuptools' messages about every compiler that DeepSpeed tries, which go to the root
    # logger, but keep Hydra's messages.
    logging.getLogger("hydra").setLevel(logging.INFO)
    logging.getLogger().setLevel(logging.WARNING)
    # deepspeed 0.19.8 calls two collectives by names that torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
