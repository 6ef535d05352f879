"""Parsers and exit codes of the commands ``python -m rlhf.NAME``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from rlhf.base.drive_errors import convert_drive_errors
from rlhf.base.errors import USER_ERROR, RlhfError
from rlhf.base.lasting_output import survive_output_errors
from rlhf.base.safe_text import for_terminal


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of ``python -m MODULE``, which keeps the line breaks of ``description``."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run_to_exit_code(work: Callable[[], int | None]) -> int:
    """Return the exit code of ``work``; 2 after printing an error that a user can fix."""
    survive_output_errors()
    try:
        with convert_drive_errors():
            return work() or 0
    except RlhfError as error:
        sys.stderr.write(f"error: {for_terminal(str(error))}\n")
        return USER_ERROR
