"""Finish phases, and verify finished phases before their models are used.

    <run>/<phase>/manifest.json   size and SHA-256 of every file, and 8 digits of the hash of each
                                  of the phase's log lines
    <run>/<phase>/result.json     written last: the phase is finished exactly if it exists

The model files of several runs and of the store of phases may be hard links to the same data. A
byte that is damaged in one of them is damaged in all, and the manifest of each one reveals it.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlhf.base.atomic import replace_atomically
from rlhf.base.errors import CheckpointError
from rlhf.base.finite_numbers import format_json
from rlhf.base.hashing import sha256_of
from rlhf.base.stored_files import (
    MANIFEST,
    METRICS,
    RESULT,
    Identity,
    check_files,
    copy_regular_files,
    file_identities,
    find_entries,
    open_regular_file,
    read_json_lines_with_bytes,
    read_json_object,
)
from rlhf.config.choices import Phase
from rlhf.run.jsonl import LOGS
from rlhf.run.results import read_phase_result, write_json

STATE = "state"  # the checkpoints of a phase in progress, see phase_state.py
NOT_LISTED = (STATE, MANIFEST, RESULT.name)  # the manifest's list of files skips them


def finish_phase(
    run_dir: Path,
    phase: Phase,
    result: Mapping[str, Any],
    *,
    folder: Path | None = None,
    files: Mapping[str, Identity] | None = None,
) -> None:
    """Write the manifest and the result of a phase whose files and log lines are complete.

    ``folder`` holds the files (None: the phase's folder in ``run_dir``). ``files`` are their sizes
    and hashes; without ``files``, the files are read to compute these, and flushed to the drive.
    """
    folder = folder or run_dir / phase
    folder.mkdir(parents=True, exist_ok=True)
    if files is None:
        files = file_identities(folder, skip=NOT_LISTED)
    written = [run_dir / name for name in sorted(LOGS) if (run_dir / name).exists()]
    lines = {path.name: " ".join(mark_lines(path, phase)) for path in written}
    text = format_json(result).encode()
    identity: Identity = [len(text), sha256_of(text)]
    write_json(folder / MANIFEST, {"files": {**files, RESULT.name: identity}, "lines": lines})
    write_json(folder / RESULT, result)


def verify_phase(run_dir: Path, phase: Phase) -> str | None:
    """Compare a finished phase with its manifest; return a notice if log lines are lost, or None.

    For a phase of an older version, whose manifest is missing or has no lines, the notice says what
    is not verified. Lines that were written after the manifest are not compared.

    Raises:
        CheckpointError: naming the file that is missing, added or damaged, and the repair.
    """
    folder = run_dir / phase
    if not (folder / MANIFEST).exists():
        return f"{folder} has no {MANIFEST}, since an older version wrote it: it is not verified"
    with _add_repair_advice(folder):
        manifest = read_json_object(folder / MANIFEST)
        files = manifest["files"]
        listed = {name.partition("/")[0] for name in files}
        # The checkpoints, and files that the user has added, are not verified.
        others = {each.name for each in find_entries(folder, "*")} - listed
        check_files(folder, files, skip=others)
        if "lines" not in manifest:
            return f"{folder / MANIFEST} is of an older version: log lines are not verified"
        for name in manifest["lines"].keys() & LOGS:
            marks, present = manifest["lines"][name].split(), list[str]()
            with suppress(CheckpointError):  # a damaged line
                present = mark_lines(run_dir / name, phase)
            if present[: len(marks)] != marks:
                return (
                    f"{run_dir / name} does not have the {len(marks)} lines that {phase} wrote: "
                    "the models are intact, but the report may lack curves, samples or alarms"
                )
    return None


def verify_model(folder: Path) -> None:
    """Verify the model in ``folder``, a subfolder of its finished phase, as ``verify_phase`` does.

    A model that no manifest lists is not verified.
    """
    phase_dir, prefix = folder.parent, f"{folder.name}/"
    if not (phase_dir / RESULT).exists() or not (phase_dir / MANIFEST).exists():
        return
    with _add_repair_advice(phase_dir):
        files = read_json_object(phase_dir / MANIFEST)["files"]
        listed = [name for name in files if name.startswith(prefix)]
        if listed:
            check_files(folder, {n.removeprefix(prefix): files[n] for n in listed}, skip=())


def phase_lines(path: Path, phase: str) -> Iterator[bytes]:
    """Yield the lines of a log that belong to a phase; skip an incomplete last line.

    Raises:
        DamagedFileError: if another line is not a JSON object with a phase.
    """
    lines = read_json_lines_with_bytes(path, {"phase": str})
    return (line + b"\n" for line, value in lines if value["phase"] == phase)


def mark_lines(path: Path, phase: str) -> list[str]:
    """Return 8 digits of the hash of each line of a phase, to detect changed lines."""
    return [sha256_of(line)[:8] for line in phase_lines(path, phase)]


@contextmanager
def _add_repair_advice(phase_dir: Path) -> Iterator[None]:
    """Add advice on how to repair the phase in ``phase_dir`` to errors in the context."""
    try:
        yield
    except (CheckpointError, OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        is_named = isinstance(error, CheckpointError)
        problem = str(error) if is_named else f"{phase_dir / MANIFEST} is damaged: {error!r}."
        raise CheckpointError(
            f"{problem} Restore it, or remove {phase_dir / RESULT}: "
            f"python launch.py resume={phase_dir.parent} then trains {phase_dir.name} again"
        ) from error


def iterate_metrics(run_dir: Path) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield the phase, number and metrics of each logged step, with NaN in place of null."""
    for line in METRICS.read_lines(run_dir):
        values = {n: math.nan if v is None else v for n, v in line.items() if "/" in n}
        yield line["phase"], line["step"], values


def copy_phase_lines(source: Path, phase: Phase, target: Path, name: str) -> None:
    """Append a phase's lines from the log ``source/name`` to the log ``target/name``."""
    with open(target / name, "ab", opener=open_regular_file) as file:
        file.writelines(phase_lines(source / name, phase))


def link_phase(source: Path, phase: Phase, target: Path, *, reused_from: str) -> None:
    """Add a finished phase of the folder ``source`` to the run ``target``, as hard links or copies.

    The phase's result stores ``reused_from``, the run that trained it. The folder appears complete
    or not at all. The caller must have verified the phase and copied its log lines.
    """
    result = read_phase_result(source, phase)
    assert result is not None, f"{source} has not finished {phase}"
    with replace_atomically(target / phase) as building:
        left_out = (*NOT_LISTED, ".*")
        copy_regular_files(source / phase, building, copy_function=link_or_copy, skip=left_out)
        reused = {"reused_from": reused_from} | result
        manifest = source / phase / MANIFEST  # an older version wrote none
        files = read_json_object(manifest)["files"] if manifest.exists() else None
        finish_phase(target, phase, reused, folder=building, files=files)


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link, or a copy if the folders are on different file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
