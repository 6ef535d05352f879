"""Import a user's own code by name, and say in one line where it failed."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rlhf.base.errors import ConfigError

LONGEST_REASON = 500  # characters of an error's message, which often quotes a response


def import_user_object(key: str, target: str) -> tuple[Any, str | None]:
    """Return what MODULE:NAME names, and its module's file; only for a process of its own.

    Raises:
        ConfigError: if it cannot be imported; the message begins with ``key``.
    """
    place, _, name = target.partition(":")
    os.environ.pop("PYTHONSAFEPATH", None)  # what the code starts is the user's own
    file = None
    try:
        sys.path.append(os.getcwd())  # last: a file json.py there must not replace Python's json
        spec = find_spec(place)
        file = None if spec is None else spec.origin
        return getattr(import_module(place), name), file
    except BaseException as error:  # the module's own code may raise anything
        raise ConfigError(
            f"{key}={target}: cannot be imported: {failure_reason(error, file)}. Give MODULE:NAME, "
            "importable from here"
        ) from error


def failure_reason(error: BaseException, file: str | None) -> str:
    """Return what went wrong in one line, and where in ``file``, the module of the user's code."""
    lines = (line.strip() for line in str(error).splitlines())
    first = next((line for line in lines if any(map(str.isalnum, line))), "")  # no frame of stars
    text = f"{type(error).__name__}: {first[:LONGEST_REASON]}".removesuffix(": ")
    frames = traceback.walk_tb(error.__traceback__)
    places = [str(line) for frame, line in frames if frame.f_code.co_filename == file]
    return f"{text} ({':'.join([file, *places[-1:]])})" if file else text
