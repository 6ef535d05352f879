"""Read and write results: JSON files that appear complete or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.atomic import replacing
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig


def write_json(path: Path, content: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write a JSON file atomically: a reader sees the old file or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as building:
        building.write_text(json.dumps(content, indent=indent) + "\n")


def phase_result_path(run_dir: Path, phase: str) -> Path:
    """Return the path of a phase's result; the file exists exactly if the phase is finished."""
    return run_dir / phase / "result.json"


def finished_phases(run_dir: Path) -> list[Phase]:
    """Return the phases that ``run_dir`` has finished."""
    return [phase for phase in Phase if phase_result_path(run_dir, phase).exists()]


def taken_phases(config: RunConfig) -> list[Phase]:
    """Return the phases that a run takes from the run ``config.from_run``; it trains the last."""
    if config.from_run is None:
        return []
    finished = finished_phases(Path(config.from_run))
    return [phase for phase in config.phase.order[:-1] if phase in finished]


def phase_result(run_dir: Path, phase: str) -> dict[str, Any] | None:
    """Return the result of a finished phase; None if the phase is not finished."""
    path = phase_result_path(run_dir, phase)
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result
