"""Run a Python program on a pretended GPU, with the Python processes that it starts.

    python -m tests.pretend_cuda PROGRAM ARGUMENTS
    python -m tests.pretend_cuda -m MODULE ARGUMENTS

At its end it prints what the program itself asked of the GPU, and at which lines.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.pretend_cuda.gpu import Counts, load
from tests.pretend_cuda.whole_process import for_children, pretend, pretend_driver


def main() -> None:
    """Run the program or module that the command names on a GPU."""
    gpu = pretend(load())
    pretend_driver()
    for_children()
    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[1 + is_module :]
    with gpu.counting() as counts:
        try:
            if is_module:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
                runpy.run_path(sys.argv[0], run_name="__main__")
        finally:
            show(counts)


def show(counts: Counts) -> None:
    """Print the events, and the lines at which most of them happened."""
    for event, number in counts.events.items():
        print(f"{event.name}: {number}", file=sys.stderr)
        for place, times in list(counts.lines(event).items())[:12]:
            print(f"    {times:8} {place}", file=sys.stderr)


if __name__ == "__main__":
    main()
