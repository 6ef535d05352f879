"""Try hostile inputs at every door, and print the faults."""

import argparse
import sys
import tempfile
from itertools import islice
from pathlib import Path

from tests.fuzz.case import judged, report_faults
from tests.fuzz.doors import DOORS, mixed
from tests.quick_hydra import compose_once, compose_quickly


def main() -> int:
    """Try the inputs; return 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=700)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--door", choices=DOORS, action="append")
    options = parser.parse_args()
    doors = {name: DOORS[name] for name in options.door or DOORS}
    compose_quickly()
    compose_once()
    with tempfile.TemporaryDirectory() as folder:
        tried = islice(mixed(options.seed, Path(folder), doors), options.cases)
        return report_faults((case, *judged(case)) for case in tried)


if __name__ == "__main__":
    sys.exit(main())
