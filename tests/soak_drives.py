"""Refuse every file that a run writes, one after the other, and compare with an undisturbed run.

    python -m tests.soak_drives [--folder FOLDER]     (make soak)

One run is stopped at each of its files by a full drive, and continued by the same command; so too
with a read-only drive and an exhausted quota.
"""

import argparse
import errno
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf.gpu_check.runs import differing_files
from tests.runs import ROOT, TINY_RUN, python

NUMBERS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)
COMMAND = [*TINY_RUN, "checkpoint.every_steps=1", "resume=auto"]
REFUSED = 2
NOT_WORTH_A_RUN = ("report.html",)  # a warning, and the run succeeds


def attempt(run_dir: Path, name: str, number: int) -> tuple[int, str]:
    """Start or continue a run while ``name`` is refused; return exit code and all that it said."""
    words = [number, name, run_dir, *COMMAND]
    run = python(ROOT / "tests" / "drive_faults.py", *words, cwd=run_dir.parent)
    return run.returncode, run.stdout + run.stderr


def files_of_run(folder: Path) -> list[str]:
    """Run undisturbed in ``folder / "whole"``; return the files in the order of their creation."""
    listed = folder / "names"
    code, said = attempt(folder / "whole", str(listed), 0)
    assert code == 0, said
    return listed.read_text().split("\n")


def faults(run_dir: Path, names: Sequence[tuple[str, int]], say: Callable[[str], None]) -> int:
    """Refuse files one after the other, then none; return how many were not handled well."""
    bad = 0
    for name, number in [*names, ("-", 0)]:
        code, said = attempt(run_dir, name, number)
        reason, is_fine = os.strerror(number), code == 0 and "Traceback" not in said
        if name in NOT_WORTH_A_RUN:
            is_fine &= f"warning: the report of {run_dir} is incomplete: {reason}" in said
        elif name != "-":
            # Of a checkpoint, and of what Rust code writes, the message names the folder.
            of_folder = r"(?<=step-N).*|/(model\.safetensors|tokenizer\.json)$"
            file = re.sub(of_folder, "", f"{run_dir}/{name}")
            is_fine = file in re.sub(r"step-\d+", "step-N", said) and reason in said
            is_fine &= code == REFUSED and "Traceback" not in said
        bad += not is_fine
        say(f"{'fine' if is_fine else 'FAULT'}: {name}, {reason}: exit code {code}")
        if not is_fine:
            say(said)
    return bad


def main() -> int:
    """Run the soak; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    os.environ.update(DS_ACCELERATOR="cpu")
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="drives-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    names, bad = files_of_run(folder), 0
    for number in NUMBERS:
        run_dir = folder / errno.errorcode[number]
        bad += faults(run_dir, [(name, number) for name in names], print)
        if found := differing_files(folder / "whole", run_dir):
            print(f"DIFFERENT: {', '.join(found)}")
            bad += 1
    print(f"{len(names)} files, {len(NUMBERS)} errors: {bad} faults")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
