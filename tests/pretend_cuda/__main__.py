"""python -m tests.pretend_cuda PROGRAM ARGUMENTS: run a Python program on a pretended GPU.

At its end it prints what the program asked of the GPU, and at which lines.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.pretend_cuda.gpu import Counts, Gpu, load


def main(program: str) -> None:
    """Run ``program`` on a GPU."""
    gpu = Gpu(load())
    from tests.pretend_cuda.torch_cuda import replace

    gpu.start()
    replace(gpu, setattr)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(program).resolve().parent))
    with gpu.counting() as counts:
        try:
            runpy.run_path(program, run_name="__main__")
        finally:
            show(counts)


def show(counts: Counts) -> None:
    """Print the events, and the lines at which most of them happened."""
    for event, number in counts.events.items():
        print(f"{event.name}: {number}", file=sys.stderr)
        for place, times in list(counts.lines(event).items())[:12]:
            print(f"    {times:8} {place}", file=sys.stderr)


main(sys.argv[1])
