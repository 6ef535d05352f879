"""Follow a run's progress, pace and state; planned values stand beside measured values."""

from __future__ import annotations

import re
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.program import name_commands
from rlhf.base.stored_files import (
    MEASURED,
    METRICS,
    RESULT,
    DamagedFileError,
    read_json,
    read_stored_text,
)
from rlhf.config.choices import Phase
from rlhf.config.run_dir import LOCK
from rlhf.report.summary import duration_text
from rlhf.run.results import finished_phases, phase_result_path, read_plan

LONG_SILENT = 300  # seconds without a line after which a run on another machine may have ended
MISSED_STEPS = 10  # a phase is late if it writes no line for the time of this many steps
LEAST_LATE = 30  # least seconds without a line to be late: evaluations take longer than steps
MOST_OBSERVED = 50  # most recent observations over which the pace is averaged


class RunState(NamedTuple):
    """The state of a run, such as running or ended, as one word and as a sentence."""

    word: str  # waiting, running, silent, ended or finished
    text: str


class PhaseProgress(NamedTuple):
    """The progress of a phase; times are in hours, or None if they are unknown."""

    name: str
    state: str  # waiting, running or done
    step: int
    steps: int | None
    planned: float | None
    taken: float | None  # None also before the phase is done
    left: float | None
    planned_pace: float | None  # seconds per step
    pace: float | None
    planned_memory: float | None  # GiB
    memory: float | None

    @property
    def taken_or_left(self) -> str:
        """Return the time that the phase took or still needs, as text; "" before it starts."""
        if self.state == "waiting":
            return ""
        return time_text(self.taken) if self.state == "done" else f"{time_text(self.left)} left"


class RunProgress:
    """The phases, steps, pace and latest metrics of one run, updated by lines of metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reset()

    def reset(self) -> None:
        """Discard everything that was read from metrics.jsonl."""
        self.phase: str | None = None
        self.latest: dict[str, float | None] = {}
        self._plan: Mapping[str, Any] | None = None
        self._steps: dict[str, int] = {}
        # Times are from time.monotonic(), since the machine's clock may be changed during a run.
        self._seen: deque[tuple[float, int]] = deque(maxlen=MOST_OBSERVED)  # time, step
        self._line_time: float | None = None

    def add_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add new lines of metrics.jsonl; the last line's time is the file's last modification."""
        before = self.phase, self._steps.get(self.phase or "")
        for line in lines:
            self.phase = line["phase"]
            self._steps[line["phase"]] = line["step"]
            self.latest |= {k: v for k, v in line.items() if "/" in k}
        if lines:
            self._line_time = time.monotonic() - (_age(self.folder / METRICS) or 0.0)
        if self.phase is None or before == (self.phase, self._steps[self.phase]):
            return
        if before[0] != self.phase:
            self._seen.clear()
        if self._line_time is not None:
            self._seen.append((self._line_time, self._steps[self.phase]))

    @property
    def step_text(self) -> str:
        """Return the current phase and step as text, such as "ppo 12 of 40"."""
        if self.phase is None:
            return ""
        steps = self._planned_phases().get(self.phase, {}).get("steps")
        return f"{self.phase} {self._steps[self.phase]}" + (f" of {steps}" if steps else "")

    @property
    def pace(self) -> float | None:
        """Return the mean seconds per step that this process observed in the current phase."""
        if len(self._seen) < 2 or self._seen[-1][1] <= self._seen[0][1]:  # noqa: PLR2004
            return None
        (started, first), (ended, last) = self._seen[0], self._seen[-1]
        return (ended - started) / (last - first)

    def _planned_phases(self) -> Mapping[str, Any]:
        """Return the phases of plan.json by name; plan.json is read again only while missing."""
        self._plan = self._plan or read_plan(self.folder)
        return {} if self._plan is None else self._plan["phases"]

    def phases(self) -> list[PhaseProgress]:
        """Return the phases of the run in their order."""
        plan = self._planned_phases()
        done = {*finished_phases(self.folder)}
        names = [name for name in Phase if name in {*plan, *self._steps, *done}]
        return [
            self._phase_progress(name, plan.get(name, {}), is_done=name in done) for name in names
        ]

    def _phase_progress(
        self, name: str, plan: Mapping[str, Any], *, is_done: bool
    ) -> PhaseProgress:
        hours, steps, step = plan.get("hours"), plan.get("steps"), self._steps.get(name, 0)
        planned_pace = 3600 * hours / steps if hours is not None and steps else None
        is_running = not is_done and name == self.phase
        pace = self.pace if is_running else None
        taken, left = None, hours
        memory = self.latest.get("memory/peak_gib") if name == Phase.ppo else None
        if is_done:
            result = read_json(phase_result_path(self.folder, name), {"measured?": MEASURED}) or {}
            measured = result.get("measured", {})
            left, taken = 0.0, measured.get("hours")
            steps = step or steps  # the steps taken; the plan's number may be an estimate
            memory = measured.get("memory_gib")
            pace = 3600 * taken / step if taken is not None and step else None
        elif is_running and steps is not None:
            seconds = pace if pace is not None else planned_pace  # per step
            left = None if seconds is None else max(0, steps - step) * seconds / 3600
        return PhaseProgress(
            name,
            "done" if is_done else "running" if is_running else "waiting",
            step,
            steps,
            hours,
            taken,
            left,
            planned_pace,
            pace,
            plan.get("memory_gib_per_rank"),
            memory,
        )

    def hours_left(self) -> float | None:
        """Return the hours until the last phase ends; None if they are unknown for any phase."""
        phases = self.phases()
        known = [phase.left for phase in phases if phase.left is not None]
        return sum(known) if phases and len(known) == len(phases) else None

    def _pace_if_late(self, age: float) -> float | None:
        """Return the seconds per step of the running phase if its next line is late, else None."""
        for phase in self.phases():
            pace = phase.pace or phase.planned_pace
            if phase.state == "running" and pace and age > max(LEAST_LATE, MISSED_STEPS * pace):
                return pace
        return None

    def state(self) -> RunState:
        """Return the state of the run, derived from its result, lock file, last line and pace."""
        if (self.folder / RESULT).exists():
            return RunState("finished", "finished")
        written, started = (_age(self.folder / name) for name in (METRICS, LOCK))
        if written is None and started is None:
            return RunState("waiting", "has not started")
        age = (started or 0.0) if written is None else written
        if self._line_time is not None:
            age = time.monotonic() - self._line_time
        last_sign = f"{'began' if written is None else 'last line'} {age_text(age)} ago"
        is_alive = is_process_alive(self.folder)
        late = self._pace_if_late(age)
        if late is None and (is_alive or (is_alive is None and age < LONG_SILENT)):
            doing = "starting" if written is None else "running"
            return RunState("running", f"{doing}, {last_sign}")
        if is_alive:
            return RunState("silent", f"may be hanging: a step takes {late:.2g} s, {last_sign}")
        advice = name_commands(f"python launch.py resume={self.folder} continues the run")
        if is_alive is False:
            return RunState("ended", f"stopped, {last_sign}; {advice}")
        return RunState("silent", f"on another machine or ended, {last_sign}")


def age_text(seconds: float) -> str:
    """Return a duration in seconds as text with one unit, such as "5 min"."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def time_text(hours: float | None) -> str:
    """Return a number of hours as duration_text does; a question mark if it is unknown."""
    return "?" if hours is None else duration_text(hours)


def short_number_text(value: float | None) -> str:
    """Return a number as text with three significant digits; "" if the number is unknown."""
    return "" if value is None else f"{value:.3g}"


def _age(path: Path) -> float | None:
    """Return the seconds since a file was modified; None if there is no file."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def is_process_alive(folder: Path) -> bool | None:
    """Return True if the process in the lock file runs; None if it is not of this machine."""
    try:
        match = re.fullmatch(r"process (\d{1,9}) on (\S+)\n", read_stored_text(folder / LOCK) or "")
    except DamagedFileError:
        return None
    if match is None or match[2] != socket.gethostname():
        return None
    return Path(f"/proc/{match[1]}").exists()
