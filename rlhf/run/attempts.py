"""Record what each attempt at a run begins with, which ``python -m rlhf.runs verify`` compares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf.base.hashing import sha256_of
from rlhf.base.stored_files import OTHERS, read_bytes, read_json
from rlhf.config.freeze import COMMAND, FROZEN
from rlhf.run.results import INPUTS, write_json

ATTEMPTS = "attempts.json"
MAYBE_HASH = (str, type(None))  # null: there is no such file
ATTEMPT = {"files": {OTHERS: MAYBE_HASH}, "environment": {OTHERS: str}}


def record_attempt(run_dir: Path, environment: Mapping[str, str]) -> None:
    """Append the hashes of the files that begin a run, and the ``environment`` that computes it."""
    files = hash_files(run_dir, (FROZEN, COMMAND, INPUTS))
    attempts = [*read_attempts(run_dir), {"files": files, "environment": environment}]
    write_json(run_dir / ATTEMPTS, {"attempts": attempts})


def read_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the attempts at a run, the first first; [] if an older version ran it."""
    found = read_json(run_dir / ATTEMPTS, {"attempts": [ATTEMPT]}) or {"attempts": []}
    return list(found["attempts"])


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str | None]:
    """Return the SHA-256 of each of the files ``names`` in ``folder``; None for a missing file."""
    contents = {name: read_bytes(folder / name) for name in names}
    return {name: None if each is None else sha256_of(each) for name, each in contents.items()}
