"""Split the message of an error into key, value, rule and remedy, for programs that read JSON.

A message has the form ``KEY=VALUE: rule; remedy``, with these variants: ``KEY: rule``,
``KEY=VALUE with OTHER=VALUE: rule``, ``KEY is missing: remedy``, ``unknown key KEY; remedy``,
``FILE, row N: rule``, ``--OPTION VALUE: rule``, and a remedy on a separate line. CONTRIBUTING.md
requires this form of every new message.
"""

from __future__ import annotations

import re
from typing import Any

from rlhf.base.errors import USER_ERROR, RlhfError
from rlhf.base.safe_text import sanitize_for_terminal

_FORM = re.compile(
    r"(?P<kind>unknown (?:key|option)|cannot (?:read|choose))? ?"
    r"(?P<key>[^\s=:;,]+(?: \+ [^\s=:;,]+)*)"
    r"(?:=(?P<value>\[[^\]]*\]|\{[^}]*\}|.*?))?"
    r"(?P<said>(?:, row \d+| (?:with|without|is|are|has|holds|contains|cannot|does)\b).*?)?"
    r"(?P<end>: |; |$)(?P<rest>.*)",
    re.DOTALL,
)
_OUTSIDE_BRACKETS = r"; (?![^()]*\))|\n"
_OPTION = r"^(--[\w-]+) (\S+:)"  # an option of a command with its value


def refusal_as_json(error: RlhfError) -> dict[str, Any]:
    """Return the JSON object of an error: key, value, rule, remedy, message and exit code.

    A part that the message does not state is null. If the message has another form, all of it is
    the rule. If a file is wrong, the key is the file.
    """
    message = sanitize_for_terminal(str(error))
    return {**_split_message(message), "message": message, "exit_code": USER_ERROR}


def _split_message(message: str) -> dict[str, str | None]:
    match = _FORM.match(re.sub(_OPTION, r"\1=\2", message))
    if match is None or not (
        match["end"] == ": " or match["kind"] or match["said"] or match["value"] is not None
    ):
        return {"key": None, "value": None, "rule": message, "remedy": None}
    said = match["kind"] or (match["said"] or "").lstrip(" ,")
    rule, *rest = re.split(_OUTSIDE_BRACKETS, match["rest"], maxsplit=1)
    remedy = "".join(rest)
    if match["end"] == "; " or (said == "is missing" and rule.startswith("add ")):
        rule, remedy = "", match["rest"]
    return {
        "key": match["key"],
        "value": match["value"],
        "rule": ": ".join(filter(None, (said, rule))),
        "remedy": remedy or None,
    }
