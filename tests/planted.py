"""Plant one-line regressions in a copy of the source; a named test must find each.

    python -m tests.planted [--only WORD]     (make soak)

Each line of ``planted.jsonl`` has the path of a file, a text that occurs in it once, the text that
brings a repaired fault back, and the test of ``make test`` that is red with it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.runs import ROOT

FAULTS = Path(__file__).with_name("planted.jsonl")
COPIED = ("rlhf", "conf", "sweeps", "tests", "tools", "docs", "examples", "benchmarks")
RED = 1  # pytest's exit code if tests failed; others mean that it could not run them


class Fault(NamedTuple):
    """A regression, and the test that finds it."""

    path: str
    old: str
    new: str
    test: str


def read_faults() -> list[Fault]:
    """Return the planted regressions of ``planted.jsonl``."""
    return [Fault(**json.loads(line)) for line in FAULTS.read_text().splitlines()]


def copy_source(tree: Path) -> Path:
    """Copy the source to ``tree`` without bytecode; return ``tree``."""
    for name in COPIED:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    return tree


def is_found(fault: Fault, tree: Path) -> bool:
    """Return True if the fault's test is red with the fault in ``tree``, a copy of the source."""
    path = tree / fault.path
    sound = path.read_text()
    path.write_text(sound.replace(fault.old, fault.new))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", fault.test]
        run = subprocess.run(
            command,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(sound)
    if run.returncode not in (0, RED):
        sys.stdout.write(run.stdout[-2000:])
    return run.returncode == RED


def main() -> None:
    """Plant every fault in turn; exit with 1 if a test does not find its fault."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", default="", help="faults whose path or test has this word")
    only = options.parse_args().only
    faults = [fault for fault in read_faults() if only in f"{fault.path} {fault.test}"]
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_source(Path(folder))
        found = 0
        for fault in faults:
            if is_found(fault, tree):
                found += 1
            else:
                print(f"missed: {fault.path}: {fault.new.strip()!r} by {fault.test}", flush=True)
    print(f"{found} of {len(faults)} planted regressions found")
    raise SystemExit(found < len(faults))


if __name__ == "__main__":
    main()
