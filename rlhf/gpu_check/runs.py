"""Start runs of launch.py in separate processes, and compare runs that should be equal."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.base.errors import CheckpointError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.program import LAUNCHER
from rlhf.base.stored_files import METRICS, read_json_object
from rlhf.gpu_check.rows import extend_deadline
from rlhf.jobs.sweep_jobs import PARENT
from rlhf.run.jsonl import OPTIONS_LOGS
from rlhf.run.metric_table import varies_between_runs
from rlhf.run.results import read_plan

FIRST_LIMIT = 600  # seconds for the first run, which may read torch from a slow drive, and compile
LEAST_LIMIT, TIMES_SLOWEST = 240, 4  # seconds; a later run may take 4 times as long as the slowest
RUNS: dict[str, Any] = read_yaml_beside(__file__, "runs.yaml")
SPARE_SECONDS = 60  # within which a part must continue after its run
# Two runs at a time, or one per four cores if more, since a run often uses only one core.
SIDE_BY_SIDE = ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)) // 4))
RUN_SECONDS: list[float] = []  # durations of the runs that have ended in this process
PIPELINE = ("sft", "reward", "ppo")
TIME_AND_MEMORY = ("seconds", "peak_memory_gib", "planned", "measured")  # keys in result.json
COMPARED = (".safetensors", "samples.jsonl", "alarms.jsonl", *OPTIONS_LOGS, "held_out.json")


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """A run of launch.py that has ended."""

    run_dir: Path
    code: int
    output: str
    """Text that the run printed on stdout and stderr."""
    seconds: float

    @property
    def last_line(self) -> str:
        """Return the last error that the run printed or, without an error, its last line."""
        lines = self.output.strip().splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or ["nothing was printed"])[-1].removeprefix("error: ")

    @property
    def finished_dir(self) -> Path:
        """Return ``run_dir``, which has the files of a whole run.

        Raises:
            CheckpointError: if the run failed; the message has the last line that it printed.
        """
        if self.code:
            raise CheckpointError(f"exit code {self.code}: {self.last_line}")
        return self.run_dir

    @property
    def phases(self) -> dict[str, Any]:
        """Return the results of the phases in result.json."""
        phases: dict[str, Any] = read_json_object(self.finished_dir / "result.json")["phases"]
        return phases

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        return list(METRICS.read_lines(self.finished_dir))


def run_to_end(run_dir: Path, text: str, *words: str) -> EndedRun:
    """Start a new run in ``run_dir``, and wait for its end; write its output to a file beside it.

    The words in ``text`` are expanded as in runs.yaml, and those in ``words`` added as they are.
    Overrides that none of the run's phases reads are dropped, since the launcher refuses them.

    Raises:
        TimeoutExpired: if the run does not end in ``limit_of_run()`` seconds; the run is killed.
    """
    last = {word.partition("=")[0]: word for word in (*expand_words(text), *words)}
    return _run_launcher(run_dir, [*drop_unread_overrides([*last.values()]), f"run_dir={run_dir}"])


def resume_run(run_dir: Path, *words: str) -> EndedRun:
    """Resume the run in ``run_dir``, and wait for its end, as ``run_to_end`` does."""
    return _run_launcher(run_dir, [f"resume={run_dir}", *words])


def expand_words(text: str) -> list[str]:
    """Split ``text`` into words; replace a word in capitals by the words under its name in RUNS."""
    words = []
    for word in shlex.split(text):
        is_name = word.isupper() and "=" not in word
        words += expand_words(RUNS[word.lower()]) if is_name else [word]
    return words


def drop_unread_overrides(words: Sequence[str]) -> list[str]:
    """Drop from ``words`` the overrides for phases that the run does not train."""
    chosen = [word for word in words if word.startswith(("phase=", "phase.order="))]
    phases = chosen[-1].partition("=")[2].strip("[]").split(",") if chosen else PIPELINE
    unread = [f"{phase}." for phase in PIPELINE if phase not in phases]
    unread += [] if "ppo" in phases else ["rollout."]
    return [word for word in words if not word.startswith(tuple(unread))]


def limit_of_run() -> float:
    """Return the seconds that the next run may take, given the slowest run of this process."""
    return max(LEAST_LIMIT, TIMES_SLOWEST * max(RUN_SECONDS)) if RUN_SECONDS else FIRST_LIMIT


def _run_launcher(run_dir: Path, words: Sequence[str]) -> EndedRun:
    began, log, limit = time.monotonic(), run_dir.with_suffix(".log"), limit_of_run()
    extend_deadline(limit + SPARE_SECONDS)
    # PARENT makes launch.py end when this process ends, even if this process is killed.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", PARENT: str(os.getpid())}
    environment |= dict(word.split("=", 1) for word in words if is_variable(word))
    start = log.stat().st_size if log.exists() else 0
    with log.open("ab") as file:
        process = subprocess.run(
            [sys.executable, str(LAUNCHER), *(word for word in words if not is_variable(word))],
            cwd=run_dir.parent,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=limit,
            check=False,
        )
    output = log.read_bytes()[start:].decode(errors="replace")
    RUN_SECONDS.append(seconds := time.monotonic() - began)
    return EndedRun(run_dir=run_dir, code=process.returncode, output=output, seconds=seconds)


def is_variable(word: str) -> bool:
    """Return True if ``word`` sets an environment variable, such as TORCH_DISTRIBUTED_DEBUG."""
    return word.partition("=")[0].isupper()


def planned_gib(run_dir: Path, phase: str) -> float:
    """Return the planned memory of ``phase`` in GiB, without CUDA's context; it needs plan.json."""
    if (plan := read_plan(run_dir)) is None:
        raise CheckpointError(f"{run_dir} has no plan.json")
    memory = plan["phases"][phase]["memory"]
    return float(sum(gib for purpose, gib in memory.items() if purpose != "process"))


def differing_files(one: Path, other: Path) -> list[str]:
    """Return the names of files that differ between two runs; ignore times, speed and memory."""
    ours, theirs = (
        {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
        for run_dir in (one, other)
    )
    readers = {"metrics.jsonl": metrics_without_times, "result.json": _results_without_times}
    shared = [name for name in sorted(ours & theirs) if name.endswith(COMPARED)]
    return [
        *sorted(ours ^ theirs),
        *(name for name, read in readers.items() if read(one) != read(other)),
        *(name for name in shared if (one / name).read_bytes() != (other / name).read_bytes()),
    ]


def metrics_without_times(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without the metrics of time, speed and memory."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: v for name, v in line.items() if not varies_between_runs(name)} for line in lines
    ]


def _results_without_times(run_dir: Path) -> dict[str, Any]:
    """Return the phases in result.json, without times and memory."""
    phases = json.loads((run_dir / "result.json").read_text())["phases"]
    return {
        phase: {name: value for name, value in values.items() if name not in TIME_AND_MEMORY}
        for phase, values in phases.items()
    }
