"""Plant one-line regressions in a copy of the source; a named test must find each.

    python -m tests.planted [--only WORD]     (make soak)

Each line of ``planted.jsonl`` has the path of a file, a text that occurs in it once, the text that
brings a repaired fault back, and the test of ``make test`` that is red with it.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.mutants import IMPORTED_WITH, OUTPUT, RED, copy_source, run_tests

FAULTS = Path(__file__).with_name("planted.jsonl")


class Fault(NamedTuple):
    """A regression, and the test that finds it."""

    path: str
    old: str
    new: str
    test: str


def read_faults() -> list[Fault]:
    """Return the planted regressions of ``planted.jsonl``."""
    return [Fault(**json.loads(line)) for line in FAULTS.read_text().splitlines()]


def is_found(fault: Fault, tree: Path) -> bool:
    """Return True if the fault's test is red with the fault in ``tree``, a copy of the source."""
    path = tree / fault.path
    sound = path.read_text()
    path.write_text(sound.replace(fault.old, fault.new))
    code = run_tests([fault.test], "", tree)
    path.write_text(sound)
    if code not in (0, RED):
        sys.stdout.write((tree / OUTPUT).read_text()[-2000:])
    return code == RED


def main() -> None:
    """Plant every fault in turn; exit with 1 if a test does not find its fault."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", default="", help="faults whose path or test has this word")
    only = options.parse_args().only
    faults = [fault for fault in read_faults() if only in f"{fault.path} {fault.test}"]
    os.environ.update(IMPORTED_WITH)
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
