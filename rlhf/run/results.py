"""Read and write results and attempts, and read plans, all in JSON; each file appears complete.

Each attempt at a run records what it begins with, for ``python -m rlhf_lab.verify``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf.base.atomic import write_text_atomically
from rlhf.base.finite_numbers import format_json, restore_nan
from rlhf.base.hashing import sha256_of
from rlhf.base.stored_files import (
    ATTEMPTS,
    INPUTS,
    PLAN,
    RESULT,
    DamagedFileError,
    Identity,
    read_bytes,
    read_json_object,
)
from rlhf.config.choices import Phase
from rlhf.config.freeze import COMMAND, FROZEN
from rlhf.config.schema.run import RunConfig

# Key of the configuration -> absolute path of each file that it gives a run -> size and SHA-256.
Inputs = dict[str, dict[str, Identity]]


def write_json(path: Path, content: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write a JSON file atomically; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, format_json(content, indent=indent))


def phase_result_path(run_dir: Path, phase: str) -> Path:
    """Return the path of a phase's result; the file exists exactly if the phase is finished."""
    return run_dir / phase / RESULT


def finished_phases(run_dir: Path) -> list[Phase]:
    """Return the phases that ``run_dir`` has finished."""
    return [phase for phase in Phase if phase_result_path(run_dir, phase).exists()]


def reused_phases(config: RunConfig) -> list[Phase]:
    """Return the phases that a run reuses from ``config.from_run``; never the run's last phase."""
    if config.from_run is None:
        return []
    finished = finished_phases(Path(config.from_run))
    return [phase for phase in config.phase.order[:-1] if phase in finished]


def read_phase_result(run_dir: Path, phase: str) -> dict[str, Any] | None:
    """Return the result of a finished phase; None if the phase is not finished.

    Measures that were not finite, which the file stores as null, are NaN.
    """
    path = phase_result_path(run_dir, phase)
    return restore_nan(read_json_object(path)) if path.exists() else None


def read_run_result(run_dir: Path) -> dict[str, Any] | None:
    """Return result.json of a run, with NaN in place of null; None if the run has not finished."""
    result = RESULT.read(run_dir)
    return None if result is None else restore_nan(result)


def read_objective(run_dir: Path) -> float | None:
    """Return the objective of a run; None if it is not finite, or the run has not ended."""
    path = run_dir / RESULT
    objective = read_json_object(path).get("objective") if path.exists() else None
    return float(objective) if isinstance(objective, int | float) else None


def read_plan(run_dir: Path, say: Callable[[str], None] | None = None) -> dict[str, Any] | None:
    """Return the content of plan.json; None if the file is missing or damaged.

    A damaged plan is no error, because it is only compared with measurements: ``say`` prints a
    warning.
    """
    try:
        return PLAN.read(run_dir)
    except DamagedFileError as error:
        if say is not None:
            say(f"warning: {error}. The run continues without planned values")
        return None


def record_attempt(run_dir: Path, environment: Mapping[str, str]) -> list[str]:
    """Append to attempts.json the hashes of files that define a run, and its ``environment``.

    Return how the environment differs from that of the last attempt.
    """
    files = hash_files(run_dir, (FROZEN, COMMAND, INPUTS.name))
    attempts = read_attempts(run_dir)
    before = attempts[-1]["environment"] if attempts else environment
    attempts.append({"files": files, "environment": environment})
    write_json(run_dir / ATTEMPTS, {"attempts": attempts})
    changed = [name for name in environment if environment[name] != before.get(name)]
    return [f"{name} {environment[name]}, before {before.get(name)}" for name in changed]


def read_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the attempts at a run, oldest first; [] if an older version ran it."""
    stored = ATTEMPTS.read(run_dir) or {"attempts": []}
    return list(stored["attempts"])


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str | None]:
    """Return the SHA-256 of each of the files ``names`` in ``folder``; None for a missing file."""
    contents = {name: read_bytes(folder / name) for name in names}
    return {name: None if each is None else sha256_of(each) for name, each in contents.items()}
