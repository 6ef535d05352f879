"""What the benchmarks share: runs in processes of their own, options, tables, results as JSON.

A module, not a command: ``rollout.py``, ``ppo_step.py``, ``scaling.py`` and ``loading.py`` use it.
A process that is measured is always a new one; the ways that are compared take turns, so that a
machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import queue
import resource
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shapes import SHAPES

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
CHILD = "--child"
WARM_UPS = 2  # first runs of a process, not counted
# glibc's malloc hands no freed memory back to the kernel, as `hardware.keep_freed_memory` asks for.
KEPT_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1000000000000",
    "MALLOC_TOP_PAD_": "268435456",
}

# Variables that cap the instruction sets of this project, oneDNN, torch and MKL.
CAPS = ("RLHF_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")

Samples = dict[str, list[float]]
Task = TypeVar("Task")


@dataclass(frozen=True, kw_only=True)
class Way:
    """One of the things compared: the script that measures it, and what it is told."""

    script: Path
    task: dict[str, Any]
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    may_fail: bool = False
    """Its failure is a result: the last line of its error, as ``error``."""
    busy: int = 0
    """How many processes beside it only count, each as fast as a core lets it."""

    def run(self) -> dict[str, Any]:
        """What the script measured, in a process of its own.

        Raises:
            RuntimeError: the process failed, and may not; its last words are in the message.
        """
        with busy_processes(self.busy):
            child = subprocess.run(
                [self.python, str(self.script), CHILD, json.dumps(self.task)],
                cwd=ROOT,
                env={**os.environ, **self.environment},
                capture_output=True,
                text=True,
                check=False,
            )
        if child.returncode and self.may_fail:
            last = (child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]
            return {"error": last.removeprefix("[rank0]:").strip()}
        if child.returncode:
            raise RuntimeError(f"{self.script.name} {self.task} failed:\n{child.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
        return found


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep ``count`` processes busy while the context lasts."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def take_turns(ways: Mapping[str, Way], rounds: int) -> dict[str, Samples]:
    """Every way once in each round; numbers and lists of numbers are joined over the rounds.

    What a way measured is printed as it ends, so that a run that is stopped has not lost it.
    """
    found: dict[str, Samples] = {name: {} for name in ways}
    for number in range(1, rounds + 1):
        for name, way in ways.items():
            sys.stderr.write(f"round {number} of {rounds}: {name}\n")
            measured = way.run()
            sys.stderr.write(f"  {json.dumps(measured)}\n")
            for key, value in measured.items():
                values = value if isinstance(value, list) else [value]
                found[name].setdefault(key, []).extend(values)
    return found


def on_own_cores(
    tasks: Iterable[Task], run: Callable[[Task, list[str]], None], *, at_a_time: int
) -> None:
    """Call ``run`` for each task, with words that keep the command behind them on a free core."""
    cores: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[:at_a_time]:
        cores.put(core)

    def take_a_core(task: Task) -> None:
        core = cores.get()
        run(task, ["taskset", "--cpu-list", str(core)])
        cores.put(core)

    with ThreadPoolExecutor(at_a_time) as pool:
        list(pool.map(take_a_core, tasks))


def run_on_cores(runs: Mapping[Path, Sequence[str]], *, at_a_time: int) -> None:
    """Start launch.py with the overrides of each run directory, each run on a core of its own.

    Finished runs are left out.
    """

    def run(run_dir: Path, on_core: list[str]) -> None:
        command = [*on_core, sys.executable, str(ROOT / "launch.py")]
        path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [*command, *runs[run_dir], f"run_dir={run_dir}", "resume=auto"],
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        sys.stderr.write(f"{run_dir}: exit code {done.returncode}\n{done.stderr[-500:]}")

    left = [run_dir for run_dir in runs if not is_finished(run_dir)]
    on_own_cores(left, run, at_a_time=at_a_time)


def is_finished(run_dir: Path) -> bool:
    """Return True if the run ended well; a run that broke has a report, but no result."""
    return (run_dir / "result.json").exists()


def whole_and_first(
    seconds: Callable[[int, int], float], *, tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of whole generations and of their first tokens alone, without the warm-ups.

    ``seconds`` takes a step's number and the response tokens.
    """
    pairs = [(seconds(step, tokens), seconds(step, 1)) for step in range(WARM_UPS + repeats)]
    whole, first = zip(*pairs[WARM_UPS:], strict=True)
    return {"seconds": list(whole), "first_seconds": list(first)}


def medians(samples: Samples) -> dict[str, float]:
    """Median of each measure; memory and rates of the machine are not for this."""
    return {name: statistics.median(values) for name, values in samples.items() if values}


def peak_gb(device: torch.device) -> float:
    """Most memory that this process has held, in 1e9 bytes: its own, or that of its GPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def cpu_kind() -> str:
    """The highest instruction set that the project uses on this CPU, under a cap if one is set."""
    from rlhf.base.cpu import usable_isa

    return usable_isa().name


def machine(device: str) -> dict[str, Any]:
    """Where and with what something was measured."""
    import torch

    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [
        line.partition(":")[2].strip() for line in cpuinfo.splitlines() if "model name" in line
    ]
    commit = ["git", "rev-parse", "--short", "HEAD"]
    revision = subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=False)
    packages = ("torch", "transformers", "deepspeed", "rlhf")
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "cpu_kind": cpu_kind(),
        "caps": {name: os.environ[name] for name in CAPS if name in os.environ},
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "commit": revision.stdout.strip() or None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def table(header: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    """A Markdown table; numbers get three significant digits, None a dash."""

    def cell(value: str | float | None) -> str:
        if value is None:
            return "-"
        return value if isinstance(value, str) else f"{value:,.{digits(abs(value))}f}"

    def digits(size: float) -> int:
        return next((d for d, limit in enumerate((100, 10, 1)) if size >= limit), 3)

    lines = [list(header), ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def parser(usage: str | None, *, shape: str | list[str]) -> argparse.ArgumentParser:
    """The options that all benchmarks have; ``shape`` is the default, a list where several go."""
    options = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = "+" if isinstance(shape, list) else None
    options.add_argument("--shape", choices=SHAPES, default=shape, nargs=several)
    options.add_argument("--rounds", type=int, default=3, help="turns of every way")
    options.add_argument("--repeats", type=int, default=3, help="counted runs in each turn")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--json", type=Path, help="where the figures go; default: results/")
    return options


def finish(options: argparse.Namespace, text: str, found: dict[str, Any]) -> None:
    """Print the table and write the figures, with machine and versions, as JSON.

    Every kind of CPU has files of its own: times of one kind say little of another.
    """
    name = Path(sys.argv[0]).stem
    shape = options.shape if isinstance(options.shape, str) else "_".join(options.shape)
    kind = cpu_kind() if options.device == "cpu" else options.device
    place = BENCHMARKS / "results" / f"{name}_{shape}_{kind}.json"
    place = options.json or place
    place.parent.mkdir(parents=True, exist_ok=True)
    # Paths of this machine tell nobody anything: their last part does.
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    document = {
        "benchmark": name,
        "command": shlex.join(["python", f"benchmarks/{name}.py", *words]),
        "options": vars(options),
        "machine": machine(options.device),
        **found,
    }
    place.write_text(json.dumps(document, indent=1, default=lambda path: path.name) + "\n")
    sys.stdout.write(f"{text}\n\nFigures: {place}\n")


def capped_ways(ways: Mapping[str, Way], levels: Sequence[str], *, prefix: str) -> dict[str, Way]:
    """Return the ways whose names begin with ``prefix`` under each cap of the instruction set."""
    return {
        f"{name}, {level}": replace(way, environment={**way.environment, "RLHF_MAX_CPU_ISA": level})
        for level in levels
        for name, way in ways.items()
        if name.startswith(prefix)
    }


def add_busy_option(options: argparse.ArgumentParser) -> None:
    """Add the option whose counts ``busy_ways`` takes."""
    options.add_argument(
        "--busy", nargs="+", type=int, default=[], help="also beside so many busy processes"
    )


def busy_ways(ways: Mapping[str, Way], counts: Sequence[int]) -> dict[str, Way]:
    """Return the ways beside each count of busy processes."""
    return {
        f"{name}, beside {count}": replace(way, busy=count)
        for count in counts
        for name, way in ways.items()
    }


def start(
    main: Callable[[], None] | None, measure: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Be the command, or the process that measures one way and prints what it found."""
    if sys.argv[1:2] != [CHILD]:
        if main is None:
            sys.exit(f"{sys.argv[0]} is no command: another benchmark starts it")
        main()
        return
    with redirect_stdout(sys.stderr):  # libraries print; the answer is the last line of stdout
        found = measure(json.loads(sys.argv[2]))
    sys.stdout.write(json.dumps(found) + "\n")
