"""Reuse finished phases: runs whose phases have equal inputs train them once.

The store is a folder with one entry per trained phase. The name of an entry is a hash of all that
the phase's result depends on: its part of the configuration, its data, the weights that it starts
from, the source code and the libraries. Model files in the store and in run directories are hard
links to the same data where the file system allows it; nothing ever writes to a finished file.

``python -m rlhf.checkpoint.phase_store`` lists the entries; with ``clear`` it removes them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from rlhf.atomic import replacing
from rlhf.checkpoint.results import phase_result, write_json
from rlhf.config.choices import Phase
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.run import RunConfig
from rlhf.cpu import cache_folder, read_cpu
from rlhf.user_paths import user_path

GIB = 1 << 30
PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("torch", "transformers", "deepspeed", "peft")
# The groups of the configuration that the result of a phase depends on.
READ_BY_SFT = ("seed", "hardware", "zero", "lora", "model", "data", "sft")
READ: Mapping[Phase, tuple[str, ...]] = {
    Phase.sft: READ_BY_SFT,
    Phase.reward: (*READ_BY_SFT, "reward_model", "reward"),
}


def code_version() -> str:
    """Return a hash of this package's source files and of the versions of its libraries."""
    digest = hashlib.sha256()
    for path in sorted(each for each in PACKAGE.rglob("*.*") if each.suffix in {".py", ".c", ".h"}):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    for name in LIBRARIES:
        digest.update(f"{name} {importlib.metadata.version(name)}".encode())
    return digest.hexdigest()


def phase_key(config: RunConfig, phase: Phase, *, data: str, code: str) -> str:
    """Return a hash of everything that the result of ``phase`` depends on.

    ``data`` identifies its examples and tokenizer, and those of the phases before it; ``code`` is
    ``code_version()``.

    Raises:
        KeyError: if results of this phase are not reused.
    """
    groups = {name: value for name, value in asdict(config).items() if name in READ[phase]}
    groups["data"] = {k: value for k, value in groups["data"].items() if k != "cache_dir"}
    depends = {
        "phase": phase,
        "order": config.phase.order[: config.phase.order.index(phase)],
        "groups": groups,
        "weights": [_files_of(model) for model in (config.model, config.reward_model)],
        "data": data,
        "code": code,
        "cpu": read_cpu().name,
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]


def _files_of(model: ModelConfig) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of the files of a model folder; empty for a hub id."""
    if not model.path or not (folder := user_path(model.path, key="model.path")).is_dir():
        return []
    files = sorted(each for each in folder.iterdir() if each.is_file())
    return [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]


class StoredPhase(NamedTuple):
    """An entry of the store: a phase that some run has trained."""

    key: str
    phase: str
    run: str
    bytes: int
    used: float  # seconds since the epoch


class PhaseStore:
    """A folder of finished phases; the least recently used ones are removed above ``max_gib``."""

    def __init__(self, folder: Path | None = None, *, max_gib: float) -> None:
        self.folder = folder or cache_folder() / "phases"
        self._max_bytes = max_gib * GIB

    def find(self, key: str, phase: Phase) -> Path | None:
        """Return the folder that holds the phase; None if the store does not have it."""
        entry = self.folder / key
        if phase_result(entry, phase) is None:
            return None
        os.utime(entry)
        return entry

    def put(self, key: str, phase: Phase, run_dir: Path) -> None:
        """Store the finished ``phase`` of ``run_dir``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / key, shared=True) as building:
            building.mkdir()
            metrics = _lines(run_dir / "metrics.jsonl", phase)
            (building / "metrics.jsonl").write_text("".join(metrics), encoding="utf-8")
            copy_samples(run_dir, phase, building)
            link_phase(run_dir, phase, building, reused_from=str(run_dir.resolve()))
        self._evict(keep=key)

    def entries(self) -> list[StoredPhase]:
        """Return the stored phases, the most recently used first."""
        found = []
        for path in self.folder.glob("[!.]*/*/result.json"):
            phase, folder = path.parent.name, path.parents[1]
            size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
            run = json.loads(path.read_text())["reused_from"]
            found.append(StoredPhase(folder.name, phase, run, size, folder.stat().st_mtime))
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def clear(self) -> int:
        """Remove all stored phases; return their number. Runs keep what they took."""
        entries = self.entries()
        for entry in entries:
            shutil.rmtree(self.folder / entry.key)
        return len(entries)

    def _evict(self, *, keep: str) -> None:
        total = 0
        for entry in self.entries():
            total += entry.bytes
            if total > self._max_bytes and entry.key != keep:
                shutil.rmtree(self.folder / entry.key, ignore_errors=True)


def link_phase(source: Path, phase: Phase, target: Path, *, reused_from: str) -> None:
    """Put a finished phase of the folder ``source`` into ``target``, which has not run it.

    The phase's result says which run trained it. The folder appears at once, with the result.
    """
    result = phase_result(source, phase)
    assert result is not None, f"{source} has not finished {phase}"
    with replacing(target / phase) as building:
        left_out = shutil.ignore_patterns("state", "result.json")
        shutil.copytree(source / phase, building, copy_function=_link, ignore=left_out)
        write_json(building / "result.json", {"reused_from": reused_from} | result)


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy if the folders are on different file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def logged(source: Path, phase: Phase) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield steps and metrics of a phase, as they were logged; null was a number not finite."""
    for line in _lines(source / "metrics.jsonl", phase):
        values = json.loads(line)
        step = values.pop("step")
        yield step, {n: math.nan if v is None else v for n, v in values.items() if n != "phase"}


def copy_samples(source: Path, phase: Phase, target: Path) -> None:
    """Append the samples of a phase to those in ``target``."""
    with (target / "samples.jsonl").open("a", encoding="utf-8", newline="\n") as file:
        file.writelines(_lines(source / "samples.jsonl", phase))


def _lines(path: Path, phase: Phase) -> Iterator[str]:
    """Yield the lines of metrics.jsonl or samples.jsonl that belong to a phase."""
    if path.exists():
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from (line for line in file if json.loads(line)["phase"] == phase)


def main(arguments: list[str]) -> int:
    """List or clear the store; return the exit code."""
    store = PhaseStore(max_gib=float("inf"))
    match arguments:
        case []:
            for entry in store.entries():
                size = f"{entry.bytes / GIB:6.2f} GiB"
                sys.stdout.write(f"{entry.key}  {entry.phase:<6}  {size}  {entry.run}\n")
            sys.stdout.write(f"{len(store.entries())} phases in {store.folder}\n")
        case ["clear"]:
            sys.stdout.write(f"removed {store.clear()} phases from {store.folder}\n")
        case _:
            sys.stderr.write("usage: python -m rlhf.checkpoint.phase_store [clear]\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
