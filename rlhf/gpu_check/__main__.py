"""Check what this project does on the GPU of this machine, before you trust it.

    python -m rlhf.gpu_check [OUT_FOLDER] [--only PART ...] [--minutes N] [--size tiny]

Each part runs in its own process. After each part, OUT_FOLDER/gpu_check.md and gpu_check.json are
written. Exit code 0: nothing failed; 1: a part failed; 2: no GPU, or a wrong option.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path

from rlhf.base.command import Result, build_command_parser, run_to_exit_code
from rlhf.base.errors import CapabilityError, ConfigError
from rlhf.base.user_paths import expand_user_path
from rlhf.gpu_check.processes import run_part
from rlhf.gpu_check.rows import (
    PAGE,
    CheckResults,
    Size,
    advice,
    read_parts,
    results_as_json,
    write_results,
)
from rlhf.run.console import Console


def run_check(folder: Path, check: CheckResults, *, seconds: float, size: Size) -> Result:
    """Run the parts of ``check``, print their rows, and write and return the results.

    Raises:
        ConfigError: if ``folder`` exists and is not an empty folder.
        CapabilityError: if this machine has no GPU that torch can use.
    """
    from rlhf.engine.devices import check_gpus

    try:
        check_gpus(1)
    except CapabilityError as error:
        reason = str(error).removeprefix("hardware.device=cuda: ")
        raise CapabilityError(f"python -m rlhf.gpu_check needs a GPU: {reason}") from error
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"OUT_FOLDER={folder}: is not an empty folder; name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    console, end = Console(), time.monotonic() + seconds
    for part in check.parts:
        console.say(part.title)
        began = time.monotonic()
        with closing(run_part(part, folder / part.name, size, end - began)) as rows:
            for row in rows:
                console.say(f"  {row.verdict:8} {row.what}: {row.text} [{row.seconds:.1f} s]")
        part.seconds = time.monotonic() - began
        write_results(folder, check)
    console.say(advice(check))
    console.say(f"wrote {folder / PAGE}")
    return Result(results_as_json(check), 1 if check.failed_parts else 0)


def main(arguments: Sequence[str]) -> int:
    """Run the check that the command describes; return the exit code."""
    parts = read_parts()
    parser = build_command_parser("rlhf.gpu_check", __doc__, has_json=True)
    parser.add_argument("out", nargs="?", metavar="OUT_FOLDER", help="default: runs/gpu_check/TIME")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=[part.name for part in parts])
    parser.add_argument("--minutes", type=float, default=math.inf, help="limit for all parts")
    parser.add_argument("--size", choices=list(Size), type=Size, default=Size.full)
    options = parser.parse_args(arguments)

    def check_gpu() -> Result:
        if not options.minutes > 0:
            raise ConfigError(f"--minutes {options.minutes}: must be above 0")
        now = datetime.now()
        out = f"runs/gpu_check/{now:%Y-%m-%d_%H-%M-%S}" if options.out is None else options.out
        check = CheckResults(
            started=now.isoformat(" ", timespec="seconds"),
            command=shlex.join(["python", "-m", "rlhf.gpu_check", *arguments]),
            parts=[part for part in parts if options.only is None or part.name in options.only],
        )
        folder = expand_user_path(out, key="OUT_FOLDER").resolve()
        return run_check(folder, check, seconds=60 * options.minutes, size=options.size)

    return run_to_exit_code(check_gpu, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
