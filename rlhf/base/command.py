"""Parsers, exit codes and output that survives errors, for the commands ``python -m rlhf.NAME``."""

from __future__ import annotations

import argparse
import io
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any, NamedTuple, NoReturn

from rlhf.base.errors import USER_ERROR, ConfigError, RlhfError
from rlhf.base.finite_numbers import format_json
from rlhf.base.foreign_errors import convert_drive_errors
from rlhf.base.program import name_commands
from rlhf.base.refusals import refusal_as_json
from rlhf.base.safe_text import sanitize_for_terminal


class Result(NamedTuple):
    """The result of a command: the JSON object that --json prints, and the exit code."""

    content: Mapping[str, Any]
    exit_code: int = 0


class _CommandParser(argparse.ArgumentParser):
    """A parser that reports a wrong argument as JSON too if the command line has --json."""

    _wants_json = False

    def parse_known_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse ``args`` like the base class; remember for ``error`` if --json is among them."""
        self._wants_json |= "--json" in args  # a later call may get only the remaining arguments
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Report a wrong argument, and exit with code 2."""
        if self._wants_json:
            refused = refusal_as_json(ConfigError(message.removeprefix("argument ")))
            sys.stdout.write(format_json({"error": refused}))
        super().error(message)


def build_command_parser(
    module: str, description: str | None, *, uses_run: bool = False, has_json: bool = False
) -> argparse.ArgumentParser:
    """Return a parser for ``python -m MODULE``, which keeps the line breaks of ``description``.

    With ``uses_run`` it has the option --trust-run: the user accepts that the command runs the code
    and uses the files, models and addresses outside of the run that the run's configuration names.
    With ``has_json`` it has the option --json, which ``run_to_exit_code`` explains.
    """
    parser = _CommandParser(
        prog=name_commands(f"python -m {module}"),
        description=name_commands(description or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if uses_run:
        help_text = (
            "run the code that the run's config.yaml names, and use the addresses, environment "
            "variables, data and models outside the run that it names"
        )
        parser.add_argument("--trust-run", "--trust-code", action="store_true", help=help_text)
    if has_json:
        help_text = "print one JSON document on stdout, and everything else on stderr"
        parser.add_argument("--json", action="store_true", help=help_text)
    return parser


def run_to_exit_code(work: Callable[[], Result | int | None], *, as_json: bool = False) -> int:
    """Call ``work``; return its exit code, or print an RlhfError or a drive's error, and return 2.

    With ``as_json``, ``work`` returns a Result. Its content, or {"error": ...} after an error,
    is the only text on stdout: what ``work`` and its child processes print goes to stderr.
    """
    survive_output_errors()
    set_cuda_allocator()
    with _send_output_to_stderr() if as_json else nullcontext():
        try:
            with convert_drive_errors():
                result = work()
        except RlhfError as error:
            sys.stderr.write(f"error: {sanitize_for_terminal(str(error))}\n")
            result = Result({"error": refusal_as_json(error)}, USER_ERROR)
    if not isinstance(result, Result):
        return result or 0
    if as_json:
        sys.stdout.write(format_json(result.content))
    return result.exit_code


@contextmanager
def _send_output_to_stderr() -> Iterator[None]:
    """Send to stderr what this process and its child processes write to stdout."""
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


def set_cuda_allocator() -> None:
    """Make torch's GPU allocator use expandable segments, unless the user has configured it.

    Micro-batches of many widths leave unusable gaps in segments of fixed size. Torch reads the
    environment variable only when CUDA starts: call this function before that.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the variable's older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def wait_for_exit(process: subprocess.Popen[bytes], seconds: float | None = None) -> int:
    """Wait for ``process`` and return its exit code; after ``seconds`` raise TimeoutExpired.

    Ctrl-C reaches ``process`` too: KeyboardInterrupt is raised only when ``process`` has ended.
    """
    try:
        return process.wait(seconds)
    except KeyboardInterrupt:
        process.wait()  # the process may have to end ranks on other nodes first
        raise


class _LastingFile(io.FileIO):
    """A file whose descriptor is redirected to /dev/null as soon as a write fails."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int | None:  # type: ignore[override]
        """Write ``data``; if this fails, drop it and all later output; warn, except of a pipe."""
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # redirects output of libraries and child processes too
            os.close(null)
            is_pipe = isinstance(error, BrokenPipeError)  # as in `| head`: no tool warns of it
            if not is_pipe and self.fileno() != sys.__stderr__.fileno():  # type: ignore[union-attr]
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
