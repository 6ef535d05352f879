"""Make text safe to print or store: replace secrets and control characters."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType

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
# A pattern for each kind of secret; its group 1 matches text before the secret, which is kept.
SECRET_PATTERNS: Mapping[str, str] = {
    "a Hugging Face token": r"\b()hf_[A-Za-z0-9]{20,}",
    "an API key": r"\b()sk-(?:(?:proj|ant|svcacct|admin)-[\w-]{20,}|\w{20,})",
    # Older W&B keys look like commit hashes, which are kept in revisions and in paths.
    "a W&B key": r"()\bwandb_v1_\w{20,}|"
    r"(?<![\w/@])(?<!revision=)(?<!revision: )[0-9a-f]{40}(?![\w/])",
    "a GitHub token": r"\b()(?:gh[pousr]_|github_pat_)\w{20,}",
    "a GitLab token": r"\b()glpat-[\w-]{20,}",
    "a Google key": r"\b()AIza[\w-]{30,}",
    "a Slack token": r"\b()xox[a-z]-[\w-]{10,}",
    "an AWS key": r"\b()AKIA[A-Z0-9]{16}\b",
    "a JSON web token": r"\b()eyJ[\w-]{8,2000}\.eyJ[\w-]{8,}(?:\.[\w-]*)?",
    "a password in an address": r"(://)[^/\s:@\"']+:[^/\s\"']+(?=@)",
    "a token in an address": r"(https?://)(?=[^/@]*\d)[^/\s:@\"']{8,}(?=@)",
    "a key in an address": r"(?i)([?&](?:[\w-]*(?:token|key|signature)|sig|pwd|password)=)"
    r"(?!\[redacted)[^&\s\"'#]+",
    "an HTTP credential": r"(?i)(authorization[\"']?:\s*[\"']?\w+\s|"
    r"\bbearer\s+(?=\S*\d|\S{20}))[\w.~+/=-]{8,}",
}
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
