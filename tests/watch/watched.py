"""Run directories as a run leaves them after some steps, without a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PLAN = {
    "hours": 0.5,
    "memory_gib_limit": 8.0,
    "phases": {
        "sft": {"hours": 0.1, "steps": 10, "memory_gib_per_rank": 1.0},
        "ppo": {"hours": 0.4, "steps": 40, "memory_gib_per_rank": 2.0},
    },
}
RESULT: dict[str, Any] = {
    "objective": 0.75,
    "phases": {},
    "versions": {},
    "measured": {"hours": 0.2},
}


def started_run(folder: Path) -> Path:
    """Make the directory of a run that has written nothing yet."""
    folder.mkdir(parents=True)
    config = "name: pets\nseed: 3\nppo: {rollout_batch_size: 16}\nreward_model: {init: sft}\n"
    (folder / "config.yaml").write_text(config)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    return folder


def append(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append lines of JSON to a file."""
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def sft_lines(steps: Iterable[int]) -> list[dict[str, Any]]:
    return [{"phase": "sft", "step": n, "sft/loss": 4.0 - 0.1 * n} for n in steps]


def ppo_lines(steps: Iterable[int]) -> list[dict[str, Any]]:
    names = ("score_mean", "kl_to_reference", "clipfrac", "response_tokens")
    return [
        {"phase": "ppo", "step": n, **{f"ppo/{name}": 0.01 * n for name in names}} for n in steps
    ]


def sample(step: int, response: str, prompt: str = "Name a pet.") -> dict[str, Any]:
    line = {"phase": "ppo", "step": step, "prompt": prompt, "response": response, "score": 0.5}
    return line | {"model": "actor", "kl": 0.1}


def alarm(step: int, advice: str = "Lower it.") -> dict[str, Any]:
    line = {"phase": "ppo", "step": step, "name": "clipping", "metric": "ppo/clipfrac"}
    return line | {"value": 0.5, "advice": advice}


def finish(folder: Path) -> None:
    """Write the result of a run."""
    (folder / "result.json").write_text(json.dumps(RESULT))
