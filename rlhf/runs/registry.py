"""Read the state, result, changes and origin of runs from their directories.

Only a few short files of each run are read, and no configuration is parsed as a whole, so that
thousands of runs are listed in seconds.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.stored_files import (
    ALARMS,
    BUNDLE,
    LINE,
    MAYBE_FLOAT,
    METRICS,
    OTHERS,
    RESULT,
    DamagedFileError,
    StoredFile,
    find_folders_with,
    folder_size,
    parse_json,
    read_json_lines,
    read_stored_text,
    read_tail,
)
from rlhf.config.freeze import FROZEN, PARSE_ERRORS, parse_plain_value, read_command
from rlhf.report.comparison import scan_keys, start_time
from rlhf.report.gain import JUDGES, TRAINED_ON, Gain, read_gain
from rlhf.run.results import finished_phases
from rlhf.watch.progress import RunProgress

JOB_OUTPUT = "output.log"
# Overrides that change where a run or an option is, not its results.
UNSHOWN = ("run_dir=", "name=", "resume=", "hydra.searchpath=")
# The form of the part of result.json that the list of runs shows.
INTERVAL = [MAYBE_FLOAT, MAYBE_FLOAT]
GAINS = {f"{name}_gain_ci?": INTERVAL for name in (*JUDGES, TRAINED_ON)}
PARTS = {f"score_parts_{when}?": {OTHERS: MAYBE_FLOAT} for when in ("before", "after")}
MEASURES = {"reused_from?": str, "judge_gains?": {OTHERS: INTERVAL}, **GAINS, **PARTS}
SHORT_RESULT = StoredFile(RESULT.name, {"objective": MAYBE_FLOAT, "phases": {OTHERS: MEASURES}})


class FoundRun:
    """A run; its properties are read from the files of its directory when they are first used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def started(self) -> float:
        """Return the time when the run began, in seconds since 1970."""
        return start_time(self.folder)

    @cached_property
    def bundle(self) -> Mapping[str, Any] | None:
        """Return the content of bundle.json; None if the run was not imported."""
        return BUNDLE.read_if_intact(self.folder)

    @property
    def imported_from(self) -> str | None:
        """Return the directory that an imported run had where it ran; None if it ran here."""
        return None if self.bundle is None else str(self.bundle["run"])

    @cached_property
    def state(self) -> str:
        """Return the state: waiting, running, silent, ended, failed, or finished."""
        if self.bundle is not None:
            return str(self.bundle["state"])
        word = RunProgress(self.folder).state().word
        return "failed" if word == "ended" and self.reason.startswith("error: ") else word

    @cached_property
    def reason(self) -> str:
        """Return the error or alarm that ended the run before it finished; "" if there was none."""
        if self.bundle is not None:
            return str(self.bundle["reason"])
        if (self.folder / RESULT).exists():
            return ""
        tail = read_tail(self.folder / JOB_OUTPUT).decode(errors="replace")
        reasons = [line for line in tail.splitlines() if line.startswith(("error: ", "stopped: "))]
        return reasons[-1] if reasons else ""

    @cached_property
    def last_line(self) -> Mapping[str, Any]:
        """Return the last intact line of metrics.jsonl; {} if there is none."""
        path = self.folder / METRICS
        for line in reversed(read_tail(path).splitlines()):
            with suppress(DamagedFileError):
                return dict(parse_json(path, line, LINE))
        return {}

    @cached_property
    def result(self) -> Mapping[str, Any] | None:
        """Return the content of result.json; None if the file is missing or damaged."""
        return SHORT_RESULT.read_if_intact(self.folder)

    @property
    def objective(self) -> float | None:
        """Return the objective; None if the run has not finished, or it was not a finite number."""
        return None if self.result is None else self.result["objective"]

    @property
    def gain(self) -> Gain | None:
        """Return the gain from training by the best judge; None without a result or a judge."""
        return None if self.result is None else read_gain(self.result["phases"])

    @cached_property
    def changes(self) -> list[str]:
        """Return the overrides of the run's command, without run_dir, name and resume."""
        with suppress(CheckpointError):
            return [word for word in read_command(self.folder) if not word.startswith(UNSHOWN)]
        return []

    @cached_property
    def alarms(self) -> Counter[str]:
        """Return the number of alarms by name; lines after a damaged line are not counted."""
        counts: Counter[str] = Counter()
        with suppress(DamagedFileError):
            lines = read_json_lines(self.folder / ALARMS, {"name": str})
            counts.update(line["name"] for line in lines)
        return counts

    @cached_property
    def parents(self) -> dict[str, str]:
        """Return the folders of the runs from which this run took phases, and of its sweep."""
        parents = {}
        if isinstance(from_run := self.value("from_run"), str):
            parents["from_run"] = from_run
        if (self.folder / "job.lock").exists():
            parents["sweep"] = str(self.folder.parent)
        phases = {} if self.result is None else self.result["phases"]
        for phase, measures in phases.items():
            if (origin := measures.get("reused_from")) and origin != from_run:
                parents[f"{phase} of"] = origin
        return parents

    @cached_property
    def size(self) -> int:
        """Return the size of the run's files in bytes, without the targets of links."""
        return folder_size(self.folder)

    @cached_property
    def yaml_values(self) -> Mapping[str, str]:
        """Return the values of the run's configuration as YAML text, by dotted key."""
        with suppress(CheckpointError):
            return scan_keys(read_stored_text(self.folder / FROZEN) or "")
        return {}

    def value(self, key: str) -> Any:
        """Return the value of a field of ``FIELDS``, or of a dotted key of the run's configuration.

        Return ``...`` if the run has no such key.
        """
        if key in FIELDS:
            return FIELDS[key](self)
        return parse_value(self.yaml_values[key]) if key in self.yaml_values else ...

    def as_json(self) -> dict[str, Any]:
        """Return the fields that ``--json`` prints for this run."""
        return {name: read(self) for name, read in FIELDS.items()}


FIELDS: Mapping[str, Callable[[FoundRun], Any]] = {
    "folder": lambda run: str(run.folder),
    "name": lambda run: parse_value(run.yaml_values.get("name", "null")),
    "started": lambda run: datetime.fromtimestamp(run.started).isoformat(timespec="seconds"),
    "state": lambda run: run.state,
    "reason": lambda run: run.reason,
    "phase": lambda run: run.last_line.get("phase"),
    "step": lambda run: run.last_line.get("step"),
    "finished": lambda run: [str(phase) for phase in finished_phases(run.folder)],
    "objective": lambda run: run.objective,
    "gain_ci": lambda run: run.gain and run.gain.interval,
    "changes": lambda run: run.changes,
    "alarms": lambda run: dict(run.alarms),
    "parents": lambda run: run.parents,
    "imported_from": lambda run: run.imported_from,
    "bytes": lambda run: run.size,
}


def find_runs(places: Iterable[Path]) -> list[FoundRun]:
    """Return the runs in and below ``places``, the oldest first.

    Raises:
        ConfigError: if a place is no folder.
    """
    by_path: dict[str, FoundRun] = {}
    for place in places:
        if not place.is_dir():
            raise ConfigError(
                f"{place}: there is no such folder. Name a folder with runs; without a name, the "
                "runs in runs/ are listed. Filters are KEY=VALUE, such as state=finished"
            )
        for folder in find_folders_with(FROZEN, place):
            by_path.setdefault(os.path.realpath(folder), FoundRun(folder))
    return sorted(by_path.values(), key=lambda run: (run.started, run.folder))


def filter_runs(runs: list[FoundRun], filters: Iterable[str]) -> list[FoundRun]:
    """Return the runs that fit all ``filters``.

    A filter is KEY=VALUE; KEY is a field of the list or a key of the configuration. A run fits if
    its value equals VALUE (parsed as YAML), or matches VALUE as a pattern such as 'smoke*'.

    Raises:
        ConfigError: if no run has the key of a filter.
    """
    for key, _, wanted in (word.partition("=") for word in filters):
        _require_key(key, runs)
        runs = [run for run in runs if _fits(run.value(key), wanted)]
    return runs


def _fits(value: Any, wanted: str) -> bool:
    if value is ...:
        return False
    shown = value if isinstance(value, str) else json.dumps(value)
    return value == parse_value(wanted) or fnmatchcase(shown, wanted)


def sort_runs(runs: list[FoundRun], key: str) -> list[FoundRun]:
    """Return the runs sorted by a field or key: first runs without a value, then the smallest.

    Raises:
        ConfigError: if no run has the key.
    """
    _require_key(key, runs)
    return sorted(runs, key=lambda run: _order(run.value(key)))


def _order(value: object) -> tuple[int, float, str]:
    """Return a sort key for values of any type: missing values first, then numbers, then texts."""
    if value is None or value is ...:
        return 0, 0.0, ""
    if isinstance(value, int | float):
        return 1, float(value), ""
    return 2, 0.0, value if isinstance(value, str) else json.dumps(value)


def _require_key(key: str, runs: Sequence[FoundRun]) -> None:
    if key in FIELDS or not runs or any(run.value(key) is not ... for run in runs):
        return
    known = [*FIELDS, *sorted({key for run in runs for key in run.yaml_values})]
    near = get_close_matches(key, known, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    raise ConfigError(
        f"{key}: no run has this key{hint} The fields of the list are {', '.join(FIELDS)}; all "
        "other keys are keys of config.yaml"
    )


def parse_value(text: str) -> Any:
    """Parse a value in the YAML that runs write; return ``text`` itself if this is impossible."""
    try:
        return parse_plain_value(text)
    except PARSE_ERRORS:
        return text
