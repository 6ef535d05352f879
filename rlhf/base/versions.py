"""Versions of packages, and of the code of this package."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlhf.base.hashing import sha256_of

PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("torch", "transformers", "deepspeed", "peft")


def installed_version(package: str) -> str:
    """Return the version of ``package``, or "not installed", for example for a source checkout."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@cache
def code_version() -> str:
    """Return a hash of this package's source files and of the versions of its libraries."""
    paths = sorted(path for path in PACKAGE.rglob("*.*") if path.suffix in {".py", ".c", ".h"})
    sources = [path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes() for path in paths]
    versions = [f"{name} {installed_version(name)}".encode() for name in LIBRARIES]
    return sha256_of([*sources, *versions])
