"""Read what the directories of runs say about the runs: state, result, changes and origin.

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
UNSHOWN = ("run_dir=", "name=", "resume=")  # overrides that say where a run is, not what it is
# The form of the part of result.json that the list shows.
INTERVAL = [MAYBE_FLOAT, MAYBE_FLOAT]
GAINS = {f"{name}_gain_ci?": INTERVAL for name in (*JUDGES, TRAINED_ON)}
PARTS = {f"score_parts_{when}?": {OTHERS: MAYBE_FLOAT} for when in ("before", "after")}
MEASURES = {"reused_from?": str, "judge_gains?": {OTHERS: INTERVAL}, **GAINS, **PARTS}
SHORT_RESULT = StoredFile(RESULT.name, {"objective": MAYBE_FLOAT, "phases": {OTHERS: MEASURES}})


class FoundRun:
    """A run directory; every property is read from its files when it is first used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def started(self) -> float:
        """Return when the run began, in seconds since 1970."""
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
        """Return waiting, running, silent, ended, failed, or finished."""
        if self.bundle is not None:
            return str(self.bundle["state"])
        word = RunProgress(self.folder).state().word
        return "failed" if word == "ended" and self.reason.startswith("error: ") else word

    @cached_property
    def reason(self) -> str:
        """Return why a run ended before it finished: its last error, or the alarm that ended it."""
        if self.bundle is not None:
            return str(self.bundle["reason"])
        if (self.folder / RESULT).exists():
            return ""
        tail = read_tail(self.folder / JOB_OUTPUT).decode(errors="replace")
        reasons = [line for line in tail.splitlines() if line.startswith(("error: ", "stopped: "))]
        return reasons[-1] if reasons else ""

    @cached_property
    def last_line(self) -> Mapping[str, Any]:
        """Return the last complete line of metrics.jsonl; {} if there is none."""
        path = self.folder / METRICS
        for line in reversed(read_tail(path).splitlines()):
            with suppress(DamagedFileError):
                return dict(parse_json(path, line, LINE))
        return {}

    @cached_property
    def result(self) -> Mapping[str, Any] | None:
        """Return result.json's content; None if the run has not finished or the file is damaged."""
        return SHORT_RESULT.read_if_intact(self.folder)

    @property
    def objective(self) -> float | None:
        """Return the objective of a finished run; None if it was not a finite number."""
        return None if self.result is None else self.result["objective"]

    @property
    def gain(self) -> Gain | None:
        """Return what training changed, by the run's best judge; None if nothing judged it."""
        return None if self.result is None else read_gain(self.result["phases"])

    @cached_property
    def changes(self) -> list[str]:
        """Return the overrides of the run's command that change what it computes."""
        with suppress(CheckpointError):
            return [word for word in read_command(self.folder) if not word.startswith(UNSHOWN)]
        return []

    @cached_property
    def alarms(self) -> Counter[str]:
        """Return the number of alarms by name, up to a line that is damaged."""
        found: Counter[str] = Counter()
        with suppress(DamagedFileError):
            lines = read_json_lines(self.folder / ALARMS, {"name": str})
            found.update(each["name"] for each in lines)
        return found

    @cached_property
    def parents(self) -> dict[str, str]:
        """Return the runs that this run took phases from, and its sweep, by their relation."""
        found = {}
        if isinstance(from_run := self.value("from_run"), str):
            found["from_run"] = from_run
        if (self.folder / "job.lock").exists():
            found["sweep"] = str(self.folder.parent)
        phases = {} if self.result is None else self.result["phases"]
        for phase, measures in phases.items():
            if (origin := measures.get("reused_from")) and origin != from_run:
                found[f"{phase} of"] = origin
        return found

    @cached_property
    def size(self) -> int:
        """Return the bytes of the run's files, without what links point to."""
        return folder_size(self.folder)

    @cached_property
    def texts(self) -> Mapping[str, str]:
        """Return the dotted keys of the run's configuration, and their values as YAML."""
        with suppress(CheckpointError):
            return scan_keys(read_stored_text(self.folder / FROZEN) or "")
        return {}

    def value(self, key: str) -> Any:
        """Return the value of a field of the list, or of a dotted key of the run's configuration.

        Return ``...`` if the run has no such key.
        """
        if key in FIELDS:
            return FIELDS[key](self)
        return parse_value(self.texts[key]) if key in self.texts else ...

    def as_json(self) -> dict[str, Any]:
        """Return the entry that ``--json`` prints for this run."""
        return {name: read(self) for name, read in FIELDS.items()}


FIELDS: Mapping[str, Callable[[FoundRun], Any]] = {
    "folder": lambda run: str(run.folder),
    "name": lambda run: parse_value(run.texts.get("name", "null")),
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
    found: dict[str, FoundRun] = {}
    for place in places:
        if not place.is_dir():
            raise ConfigError(
                f"{place}: there is no such folder. Name a folder with runs; without a name, the "
                "runs in runs/ are listed. Filters are KEY=VALUE, such as state=finished"
            )
        for folder in find_folders_with(FROZEN, place):
            found.setdefault(os.path.realpath(folder), FoundRun(folder))
    return sorted(found.values(), key=lambda run: (run.started, run.folder))


def filter_runs(runs: list[FoundRun], filters: Iterable[str]) -> list[FoundRun]:
    """Return the runs that fit all ``filters``.

    A filter is KEY=VALUE; KEY is a field of the list or a key of the configuration. A run fits if
    its value equals VALUE as YAML, or matches VALUE as a pattern.

    Raises:
        ConfigError: if no run has the key of a filter.
    """
    for key, _, wanted in (each.partition("=") for each in filters):
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
    """Return a sort key for values of any kind: no value first, then numbers, then texts."""
    if value is None or value is ...:
        return 0, 0.0, ""
    if isinstance(value, int | float):
        return 1, float(value), ""
    return 2, 0.0, value if isinstance(value, str) else json.dumps(value)


def _require_key(key: str, runs: Sequence[FoundRun]) -> None:
    if key in FIELDS or not runs or any(run.value(key) is not ... for run in runs):
        return
    known = [*FIELDS, *sorted({key for run in runs for key in run.texts})]
    near = get_close_matches(key, known, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    raise ConfigError(
        f"{key}: no run has this key{hint} The fields of the list are {', '.join(FIELDS)}; all "
        "other keys are those of config.yaml"
    )


def parse_value(text: str) -> Any:
    """Return the value of a text in YAML as runs write it, or the text if it is no such value."""
    try:
        return parse_plain_value(text)
    except PARSE_ERRORS:
        return text
