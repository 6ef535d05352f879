"""Reuse finished phases: runs whose phases have equal inputs train them once.

The store is a folder with one entry per trained phase. The name of an entry is a hash of all that
the phase's result depends on: its part of the configuration, its data, the weights that it starts
from, the source code, the libraries and the CPU. Model files in the store and in run directories
are hard links to the same data where the file system allows it; no finished file is written again.

``python -m rlhf.options.phase_store`` lists the entries; ``clear`` removes them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from rlhf.base.atomic import replace_atomically
from rlhf.base.cpu import cache_folder, read_cpu
from rlhf.base.errors import CheckpointError
from rlhf.base.foreign_errors import reason_of
from rlhf.base.hashing import sha256_of
from rlhf.base.stored_files import (
    MANIFEST,
    METRICS,
    SAMPLES,
    find_entries,
    folder_size,
    read_json_object,
)
from rlhf.base.trust import is_trusted, keep_others_from_writing, make_own_folder
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase
from rlhf.config.effects import values_that_affect
from rlhf.config.schema.run import RunConfig
from rlhf.options.phase_store.keys import Reuse
from rlhf.run.finished_phase import copy_phase_lines, link_phase, verify_phase
from rlhf.run.results import phase_result_path

GIB = 1 << 30
REUSED = (Phase.sft, Phase.reward)  # sweeps and searches vary only later phases


def shared_phases(config: RunConfig) -> list[Phase]:
    """Return the phases of a run that it takes from the store, or puts into it.

    A run with ``from_run`` and ``data.seed`` shares nothing: the hash of a phase does not show that
    the SFT model before it was trained with another seed.
    """
    has_other_seed = config.from_run is not None and config.data.seed is not None
    if config.reuse.phases is not Reuse.always or has_other_seed:
        return []
    return [phase for phase in config.phase.order if phase in REUSED]


def phase_key(config: RunConfig, phase: Phase, *, data: str, code: str) -> str:
    """Return a hash of everything that the result of ``phase`` depends on.

    ``data`` identifies the examples and the tokenizer of this phase and of the phases before it;
    ``code`` is ``code_version()``.
    """
    so_far = config.phase.order[: config.phase.order.index(phase) + 1]
    values = values_that_affect(config, frozenset(so_far))
    depends = {
        "phases": so_far,
        "config": values,
        "weights": [
            _list_model_files(value) for key, value in values.items() if key.endswith("model.path")
        ],
        "data": data,
        "code": code,
        "cpu": read_cpu().name,
    }
    return sha256_of(json.dumps(depends, sort_keys=True).encode())[:16]


def _list_model_files(model: str | None) -> list[tuple[str, int, int]]:
    """Return name, size and modification time of each file of a model folder; [] for a hub id."""
    if not model or not (folder := expand_user_path(model, key="model.path")).is_dir():
        return []
    files = [each for each in find_entries(folder, "*") if each.is_file()]
    return [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]


class StoredPhase(NamedTuple):
    """A line in the list of the store's entries: a phase, and the run that trained it."""

    key: str
    phase: str
    run: str
    bytes: int
    used: float  # time of the last use in seconds since the epoch


class PhaseStore:
    """A folder of finished phases; above ``max_gib``, the least recently used phases are removed.

    A run that trains, reuses or removes the entry KEY holds the lock on the file KEY.lock.
    """

    def __init__(self, folder: Path | None = None, *, max_gib: float) -> None:
        self.folder = folder or cache_folder() / "phases"
        self._max_bytes = max_gib * GIB

    def entry_lock(self, key: str) -> FileLock:
        """Return the lock of an entry, not yet acquired."""
        return FileLock(self.folder / f"{key}.lock")

    def find(self, key: str, phase: Phase, say: Callable[[str], None]) -> Path | None:
        """Return the folder of the stored phase; None if the store has no valid entry.

        The caller holds the entry's lock. ``say`` prints why an existing entry is not used.
        """
        entry = self.folder / key
        if not phase_result_path(entry, phase).exists():
            return None
        if (fault := _find_fault(entry, phase)) is not None:
            say(f"{phase}: the stored phase {entry} is not used: {fault}")
            return None
        with suppress(OSError):  # other users can read root's store, but not set times
            os.utime(entry)
        return entry

    def put(self, key: str, phase: Phase, run_dir: Path) -> None:
        """Store the finished ``phase`` of ``run_dir``; the caller holds the entry's lock.

        Raises:
            OSError: if the store cannot be written.
        """
        make_own_folder(self.folder)
        with replace_atomically(self.folder / key) as building:
            building.mkdir(mode=0o755)
            for name in (METRICS.name, SAMPLES.name):
                copy_phase_lines(run_dir, phase, building, name)
            link_phase(run_dir, phase, building, reused_from=str(run_dir.resolve()))
            keep_others_from_writing(building, building / phase, building / phase / MANIFEST)
        self._evict(keep=key)

    def entries(self) -> list[StoredPhase]:
        """Return all stored phases, damaged phases included, the most recently used first."""
        paths = [each for each in find_entries(self.folder, "[!.]*") if not each.is_symlink()]
        stored = [
            _describe_entry(each, phase)
            for each in paths
            for phase in Phase
            if (each / phase).is_dir()
        ]
        return sorted(stored, key=lambda entry: entry.used, reverse=True)

    def clear(self) -> list[str]:
        """Remove the stored phases; return the keys that are in use or cannot be removed.

        Runs that reused a phase keep its files.
        """
        self._remove_orphans()
        return [
            key for key in {entry.key: None for entry in self.entries()} if not self._remove(key)
        ]

    def _evict(self, *, keep: str) -> None:
        total = 0
        for entry in self.entries():
            total += entry.bytes
            if total > self._max_bytes and entry.key != keep:
                self._remove(entry.key)
        self._remove_orphans()

    def _remove(self, key: str) -> bool:
        """Remove an entry and its temporary files unless it is locked; return True if gone."""
        try:
            with self.entry_lock(key).acquire(blocking=False):
                for path in (self.folder / key, self.folder / f".{key}.building"):
                    if path.exists():
                        shutil.rmtree(path)
                (self.folder / f"{key}.lock").unlink()
        except (OSError, Timeout):
            pass
        return not (self.folder / key).exists()

    def _remove_orphans(self) -> None:
        """Remove the unfinished entries and the locks that killed runs have left."""
        leftovers = find_entries(self.folder, ".*.building") + find_entries(self.folder, "*.lock")
        for key in (path.stem.removeprefix(".") for path in leftovers):
            if not (self.folder / key).exists():
                self._remove(key)


def _find_fault(entry: Path, phase: Phase) -> str | None:
    """Return why an entry must not be used; None if it is intact, and a trusted user wrote it."""
    try:
        if not (entry / phase / MANIFEST).is_file():
            return f"it has no {MANIFEST}"
        if not is_trusted(entry / phase / MANIFEST):
            return "another user of this machine may have written it"
        return verify_phase(entry, phase)
    except CheckpointError as error:
        return str(error).partition(" Restore it")[0]
    except OSError as error:
        return reason_of(error)


def _describe_entry(entry: Path, phase: Phase) -> StoredPhase:
    try:
        run = str(read_json_object(phase_result_path(entry, phase)).get("reused_from"))
    except CheckpointError:
        run = "damaged: it is not used"
    used = 0.0
    with suppress(OSError):  # another process may remove it meanwhile
        used = entry.lstat().st_mtime
    return StoredPhase(entry.name, phase, run, folder_size(entry), used)
