"""Compare two runs that should be equal bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf.tracking.jsonl import DIGESTS
from rlhf.tracking.metric_table import is_timing

TIMES = ("seconds", "peak_memory_gib", "planned", "measured")
COMPARED = (".safetensors", "samples.jsonl", "alarms.jsonl", DIGESTS, "held_out.json")


def differing_files(one: Path, other: Path) -> list[str]:
    """Return the names of files that differ; ignore times and memory in metrics and results."""
    found = sorted(_files_in(one) ^ _files_in(other))
    if metrics_without_times(one) != metrics_without_times(other):
        found.append("metrics.jsonl")
    if _results_without_times(one) != _results_without_times(other):
        found.append("result.json")
    return found + [
        name
        for name in sorted(_files_in(one) & _files_in(other))
        if name.endswith(COMPARED) and (one / name).read_bytes() != (other / name).read_bytes()
    ]


def metrics_without_times(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without the metrics of time, speed and memory."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: v for name, v in line.items() if not is_timing(name)} for line in lines]


def _results_without_times(run_dir: Path) -> dict[str, Any]:
    """Return the results of the phases, without times and memory."""
    result = json.loads((run_dir / "result.json").read_text())
    return {
        phase: {k: v for k, v in values.items() if k not in TIMES}
        for phase, values in result["phases"].items()
    }


def _files_in(run_dir: Path) -> set[str]:
    return {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
