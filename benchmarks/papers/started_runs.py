"""Runs of the launcher that results measure, and what they read from them.

A run directory is named by its overrides: results that ask for the same run share it.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import is_finished, run_on_cores
from evaluated import Evaluated

from papers.claims import Figures, NotMeasurableError, Place
from rlhf.run.results import read_phase_result

QUICK = {
    "data.size": 3000,
    "data.eval_share": 0.1,
    "sft.epochs": 0.5,
    "reward.epochs": 0.1,
    "reward.eval_examples": 32,
    "ppo.steps": 4,
    "ppo.rollout_batch_size": 16,
    "ppo.mini_batch_size": 8,
    "ppo.eval_every": 2,
    "ppo.eval_prompts": 16,
}  # less of everything: shows the code at work
UNREAD = {"experiment=gold_": "reward.", "phase=pipeline_rule": "reward.", "data=local": "data."}
"""By the beginning of an override, the beginning of keys that a run with it would refuse."""


def run_of(place: Place, *overrides: str, seed: int) -> Path:
    """Run the launcher with the overrides, unless it has finished that run, and return its folder.

    Raises:
        NotMeasurableError: if the run does not end well.
    """
    words = [*overrides, f"seed={seed}", "reuse.phases=always"]
    if place.is_quick:
        kept = [word for word in words if word.partition("=")[0] not in QUICK]
        unread = tuple(UNREAD[begin] for begin in UNREAD if any(w.startswith(begin) for w in words))
        less = {key: value for key, value in QUICK.items() if not key.startswith(unread)}
        words = [*kept, *(f"{key}={value}" for key, value in less.items())]
    name = hashlib.sha256(shlex.join(words).encode()).hexdigest()[:16]
    run_dir = place.shared / "runs" / name
    run_on_cores({run_dir: words}, at_a_time=1)
    if not is_finished(run_dir):
        raise NotMeasurableError(
            f"python launch.py {shlex.join(words)}: did not finish in {run_dir}"
        )
    return run_dir


def reward_by(name: str) -> str:
    """Return the override that rewards with a function of ``constructed_rewards``."""
    function = f'function: "papers.constructed_rewards:{name}", run_code: true'
    return f"rewards.part={{kind: function, {function}}}"


def ppo_result(run_dir: Path) -> dict[str, Any]:
    """Return the result of the run's PPO phase."""
    found = read_phase_result(run_dir, "ppo")
    if found is None:
        raise RuntimeError(f"{run_dir}: has no result of PPO")
    return found


def gold_figures(name: str, curve: Sequence[Evaluated]) -> Figures:
    """Return the gold score along PPO of the run ``name``, before and after, and the KL after."""
    return {
        f"gold, {name}": [each.gold for each in curve],
        f"gold before, {name}": curve[0].gold,
        f"gold after, {name}": curve[-1].gold,
        f"KL after, {name}": curve[-1].kl,
    }
