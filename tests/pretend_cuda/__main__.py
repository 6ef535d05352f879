"""python -m tests.pretend_cuda [--machine NAME] PROGRAM ARGUMENTS: run a Python program on a GPU.

The GPU is pretended, and so is the rest of the machine (machine.py has the names), also for Python
processes that the program starts. PROGRAM is a file, or -m and a module. At its end it prints what
the program itself asked of the GPU, and at which lines.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path

from tests.pretend_cuda.gpu import ROOT, Counts
from tests.pretend_cuda.machine import MACHINES, NAME, pretend

HOOK = Path(__file__).with_name("children")


def main() -> None:
    """Run a program on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, usage=__doc__.partition(":")[0])
    parser.add_argument("--machine", choices=MACHINES, default="a100")
    parser.add_argument("-m", dest="is_module", action="store_true")
    parser.add_argument("program")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    gpu = pretend(MACHINES[asked.machine])
    for_children(asked.machine)
    sys.argv = [asked.program, *asked.words]
    with gpu.counting() as counts:
        try:
            if asked.is_module:
                runpy.run_module(asked.program, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(asked.program).resolve().parent))
                runpy.run_path(asked.program, run_name="__main__")
        finally:
            show(counts)
            print(f"allocator: {gpu.environment.allocator}", file=sys.stderr)


def for_children(machine: str) -> None:
    """Let Python processes that this one starts import sitecustomize.py of the folder HOOK."""
    paths = [str(HOOK), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ[NAME] = machine


def show(counts: Counts) -> None:
    """Print the events, and the lines at which most of them happened."""
    for event, number in counts.events.items():
        print(f"{event.name}: {number}", file=sys.stderr)
        for place, times in list(counts.lines(event).items())[:12]:
            print(f"    {times:8} {place}", file=sys.stderr)


if __name__ == "__main__":
    main()
