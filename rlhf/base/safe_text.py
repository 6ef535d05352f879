"""Make text safe to print or store: replace secrets and control characters."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType

from rlhf.base.packaged_yaml import read_yaml_beside

REDACTED = "[redacted]"
# Names of variables and keys whose values are secret. Lower-case names that only end in "token",
# such as our key model.end_token, do not match.
SECRET_NAME = (
    r"[A-Z0-9_]*(?:_KEY|_TOKEN|_SECRET|_PASS|_PWD|PASSWD|PASSWORD)|"
    r"\w*(?:(?:api|access|auth|hf|wandb|secret)_?(?:key|token)|secret|password|passwd|pwd)"
)
QUOTED = r"""(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
# Two patterns of a secret name and its value: in NAME=VALUE or JSON, and in YAML. In YAML the value
# must be quoted or one word: a sentence after "password: " is kept, like a path after "pwd=".
NAMED_VALUES = tuple(
    rf"""(?m){before}(?!\[redacted|(?<=pwd=)/)(?:{QUOTED}|[^\s"',{end}]+){after}"""
    for before, end, after in (
        (rf"""\b((?:{SECRET_NAME})(?:=|["']:\s?))""", "&", ""),
        (rf"((?:^|[{{,])[ \t]*(?:- )?(?:{SECRET_NAME}):[ ]+)", "}", r"(?=[ \t]*(?:[,}]|$))"),
    )
)
SECRETS: Mapping[str, Mapping[str, str]] = read_yaml_beside(__file__, "secret_patterns.yaml")
SECRET_PATTERNS = {kind: secret["pattern"] for kind, secret in SECRETS.items()}
_SECRETS = tuple(re.compile(form) for form in (*SECRET_PATTERNS.values(), *NAMED_VALUES))
_SECRET_NAME = re.compile(SECRET_NAME)
SHORTEST_SECRET = 8  # characters; shorter values of the environment are ordinary words


def redact(text: str, environment: Mapping[str, str]) -> str:
    """Return ``text`` with secrets of ``environment``, and text like a secret, as [redacted]."""
    for name, value in environment.items():
        is_path = value.startswith(("/", "~/", "./", "../"))
        if len(value) >= SHORTEST_SECRET and not is_path and _SECRET_NAME.fullmatch(name):
            text = text.replace(value, REDACTED)
    for form in _SECRETS:
        text = form.sub(rf"\1{REDACTED}", text)
    return text


def strip_control_characters(text: str) -> str:
    """Return ``text`` with U+FFFD for control characters, which could command a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def sanitize_for_terminal(text: str) -> str:
    """Return ``text`` with control characters replaced, and secrets redacted as by ``redact``."""
    return strip_control_characters(redact(text, os.environ))


def print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback through ``sanitize_for_terminal``; for use as ``sys.excepthook``."""
    sys.stderr.write(sanitize_for_terminal("".join(traceback.format_exception(kind, error, trace))))
