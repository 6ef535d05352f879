"""List the entries of the store of phases, or remove them.

python -m rlhf.options.phase_store [clear]
"""

from __future__ import annotations

import math
import sys

from rlhf.base.safe_text import sanitize_for_terminal
from rlhf.options.phase_store.phase_store import GIB, PhaseStore


def main(arguments: list[str]) -> int:
    """List or clear the store; return the exit code."""
    store = PhaseStore(max_gib=math.inf)
    entries = store.entries()
    match arguments:
        case []:
            for entry in entries:
                line = f"{entry.key}  {entry.phase:<6}  {entry.bytes / GIB:6.2f} GiB  {entry.run}"
                sys.stdout.write(" ".join(sanitize_for_terminal(line).splitlines()) + "\n")
            sys.stdout.write(f"{len(entries)} phases in {store.folder}\n")
        case ["clear"]:
            kept = store.clear()
            sys.stdout.write(f"removed {len(entries) - len(kept)} phases from {store.folder}\n")
            if kept:
                sys.stderr.write(f"in use, or owned by another user: {', '.join(kept)}\n")
                return 1
        case _:
            sys.stderr.write("usage: python -m rlhf.options.phase_store [clear]\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
