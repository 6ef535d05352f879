"""A refusal as JSON: its key, value, rule and remedy, from its message."""

import pytest

from rlhf.base.errors import ConfigError
from rlhf.base.refusals import refusal_as_json

# message -> key, value, rule, remedy; tests/config/test_commands.py has those of the configuration
PARTS = {
    "ppo.lam=1.1: must be from 0 to 1": ("ppo.lam", "1.1", "must be from 0 to 1", None),
    "data.path=/my data/a.jsonl: a; b; c": ("data.path", "/my data/a.jsonl", "a", "b; c"),
    "a.b=['x: y'] with c=3: too many; use 1": ("a.b", "['x: y']", "with c=3: too many", "use 1"),
    "a + b=9: at most 8; use 8": ("a + b", "9", "at most 8", "use 8"),
    "model.path=/x holds no model; use y": ("model.path", "/x", "holds no model", "use y"),
    "data.path is missing: add data.path=X": ("data.path", None, "is missing", "add data.path=X"),
    "unknown key ppo.x; did you mean y?": ("ppo.x", None, "unknown key", "did you mean y?"),
    "unknown option zero=x; options: y": ("zero", "x", "unknown option", "options: y"),
    "cannot read a=[: no end; write b": ("a", "[", "cannot read: no end", "write b"),
    "--prompts 0: must be 1 or more": ("--prompts", "0", "must be 1 or more", None),
    "/a/b.jsonl, row 3: no text; add it": ("/a/b.jsonl", None, "row 3: no text", "add it"),
    "a.csv: no text.\nTo read it: b=c; or d": ("a.csv", None, "no text.", "To read it: b=c; or d"),
    "f.csv: no rows (a; b); add some": ("f.csv", None, "no rows (a; b)", "add some"),
    "a server ended": (None, None, "a server ended", None),
}


@pytest.mark.parametrize("message", PARTS)
def test_a_message_is_split_into_its_parts(message: str) -> None:
    found = refusal_as_json(ConfigError(message))
    assert tuple(found.values()) == (*PARTS[message], message, 2)
