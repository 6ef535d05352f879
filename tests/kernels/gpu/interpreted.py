"""Run every ``interpreted_*.py``; test_triton.py starts this with TRITON_INTERPRET=1.

Triton reads the variable when it is imported. In a process that is forked with all imports done,
Triton is imported again.
"""

import sys
from pathlib import Path

import pytest


def import_triton_again() -> None:
    """Let the next import of Triton read TRITON_INTERPRET."""
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        if "_C" not in name:
            del sys.modules[name]


def main() -> int:
    """Return pytest's exit code."""
    import_triton_again()
    tests = map(str, Path(__file__).parents[1].glob("*/interpreted_*.py"))
    return pytest.main(
        ["-q", "--noconftest", "--disable-plugin-autoload", "-p", "no:cacheprovider", *tests]
    )


if __name__ == "__main__":
    raise SystemExit(main())
