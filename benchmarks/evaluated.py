"""Evaluations of a run with ``ppo.eval_every``. A module, not a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Evaluated(NamedTuple):
    """The policy on held-out prompts at one step."""

    kl: float  # nats per sequence
    score: float
    gold: float


def evaluations(run_dir: Path) -> list[Evaluated]:
    """Before PPO, and at every step that was evaluated."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    found = [
        Evaluated(line["ppo/eval_kl"], line["ppo/eval_score"], line["ppo/eval_gold"])
        for line in lines
        if "ppo/eval_gold" in line
    ]
    if len(found) <= 1:
        raise SystemExit(f"{run_dir}: no evaluations with a gold score; set ppo.eval_every")
    return found
