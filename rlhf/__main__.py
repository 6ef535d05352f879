"""Start a run, a sweep or a tool from any folder.

rlhf [KEY=VALUE ...]    the same as ``python launch.py`` in a clone
rlhf TOOL ...           the same as ``python -m rlhf.TOOL``
"""

from __future__ import annotations

import re
import runpy
import sys

from rlhf.base.program import LAUNCHER

TOOLS = "chat compare data evaluate export gpu-check replay report runs watch".split()


def main() -> int:
    """Start what the command line names; return the exit code if that does not exit."""
    word, *rest = sys.argv[1:] or [""]
    if word.replace("_", "-") in TOOLS:
        sys.argv[1:] = rest
        runpy.run_module(f"rlhf.{word.replace('-', '_')}", run_name="__main__", alter_sys=True)
    elif re.fullmatch(r"[a-z][a-z_-]*", word):
        sys.stderr.write(
            f"error: rlhf {word}: no such tool; choose one of {', '.join(TOOLS)}, or start a run "
            "with KEY=VALUE ...\n"
        )
        return 2
    else:
        runpy.run_path(str(LAUNCHER), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
