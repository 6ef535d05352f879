"""Start a run, a sweep or a tool from any folder.

rlhf [KEY=VALUE ...]    the same as ``python launch.py`` in a clone
rlhf TOOL ...           the same as ``python -m rlhf.TOOL``
"""

from __future__ import annotations

import re
import runpy
import sys

from rlhf.base.command import run_to_exit_code
from rlhf.base.errors import ConfigError
from rlhf.base.program import LAUNCHER, TOOLS


def main() -> int:
    """Start what the command line names; return the exit code if that does not exit."""
    word, *rest = sys.argv[1:] or [""]
    if (tool := word.replace("-", "_")) in TOOLS:
        sys.argv[1:] = rest
        runpy.run_module(f"rlhf.{tool}", run_name="__main__", alter_sys=True)
    elif re.fullmatch(r"[a-z][a-z_-]*", word):
        return run_to_exit_code(lambda: _refuse_tool(word))
    else:
        runpy.run_path(str(LAUNCHER), run_name="__main__")
    return 0


def _refuse_tool(word: str) -> None:
    """Raise ConfigError for a word that is no tool; the message says what to type instead."""
    from rlhf.config.hydra_errors import did_you_mean, refuse_words_of_other_programs

    refuse_words_of_other_programs([word])
    tools = [tool.replace("_", "-") for tool in TOOLS]
    raise ConfigError(
        f"rlhf {word}: no such tool; choose one of {', '.join(tools)}, or start a run with "
        f"KEY=VALUE ...{did_you_mean(word, tools)}"
    )


if __name__ == "__main__":
    sys.exit(main())
