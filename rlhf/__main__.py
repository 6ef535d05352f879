"""Start a run, a sweep or a tool from any folder.

rlhf [KEY=VALUE ...]    the same as ``python launch.py`` in a clone
rlhf TOOL ...           the same as ``python -m rlhf.TOOL``
"""

from __future__ import annotations

import runpy
import sys

from rlhf.base.program import LAUNCHER, TOOLS


def main() -> None:
    """Start what the command line names, which ends this process."""
    word, *rest = sys.argv[1:] or [""]
    if (tool := word.replace("-", "_")) in TOOLS:
        sys.argv[1:] = rest
        runpy.run_module(f"rlhf.{tool}", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(LAUNCHER), run_name="__main__")


if __name__ == "__main__":
    main()
