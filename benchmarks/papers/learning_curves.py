"""Whether TRL's GRPO and the one here learn alike from the same model, prompts and rewards.

RLHF_TRL_PYTHON names the interpreter of an environment with trl 1.16.0:

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0 \
        accelerate==1.15.0 datasets
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import BENCHMARKS, ROOT
from run_prompts import RunPrompts

from papers.claims import Figures, PaperResult, Place, Verdict
from papers.paired import difference, told, within
from papers.started_runs import run_of
from rlhf import load_run
from rlhf.base.intervals import mean_with_interval

PYTHON = "RLHF_TRL_PYTHON"
COUNTED = 14  # last steps, whose gold scores are compared
MARGIN = 0.04  # of the gold score; GRPO gains about 0.15
OTHER_SEED = 1000  # added to the seed for TRL's second run
RECIPE = (
    "experiment=gold_grpo",
    "ppo.steps=28",
    "ppo.lr_schedule=constant",
    "ppo.warmup_steps=0",
    "ppo.eval_every=0",
    "ppo.eval_prompts=16",
)


def peer_python() -> str:
    """Return the interpreter that has TRL.

    Raises:
        RuntimeError: if the variable names none; then nothing can be measured.
    """
    found = os.environ.get(PYTHON, "")
    if not Path(found).is_file():
        raise RuntimeError(f"{PYTHON}={found}: must name the python of an environment with TRL")
    return found


def measure(seed: int, place: Place) -> Figures:
    """Return the gold score of the responses of each step: ours, TRL's, and TRL's once more."""
    python = peer_python()
    ours = run_of(place, *RECIPE, seed=seed)
    task = peer_task(ours)
    curves = {
        "ours": scores(ours),
        "TRL": peer_scores(python, task | {"seed": seed}, place.folder / "trl"),
        "TRL again": peer_scores(
            python, task | {"seed": seed + OTHER_SEED}, place.folder / "again"
        ),
    }
    found: Figures = {f"gold, {name}": curve for name, curve in curves.items()}
    ends = {name: statistics.fmean(curve[-COUNTED:]) for name, curve in curves.items()}
    return found | {f"gold of the last steps, {name}": end for name, end in ends.items()}


def peer_task(run_dir: Path) -> dict[str, object]:
    """Return what TRL needs to know of the run: its SFT model, prompts and settings."""
    config = load_run(run_dir)
    ppo = config.ppo
    return {
        "model": str(run_dir / "sft" / "model"),
        "prompts": RunPrompts.of(run_dir).train,
        "steps": ppo.steps,
        "responses": ppo.rollout_batch_size,
        "group": ppo.responses_per_prompt,
        "mini_batch": ppo.mini_batch_size,
        "epochs": ppo.ppo_epochs,
        "tokens": config.rollout.max_response_tokens,
        "rate": ppo.actor_lr,
        "penalty": ppo.kl_ctl,
    }


def peer_scores(python: str, task: Mapping[str, object], folder: Path) -> list[float]:
    """Return the mean score of each step of TRL's run in ``folder``."""
    folder.mkdir(exist_ok=True)
    file = folder / "task.json"
    file.write_text(json.dumps({**task, "folder": str(folder)}))
    script = BENCHMARKS / "papers" / "peer_grpo.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([python, str(script), str(file)], check=True, env=environment)
    return [statistics.fmean(each) for each in json.loads((folder / "gold.json").read_text())]


def scores(run_dir: Path) -> list[float]:
    """Return the mean score of the rollout of each step."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["ppo/score_mean"] for row in rows if "ppo/score_mean" in row]


def apart(found: Mapping[int, Figures], name: str) -> int:
    """Count seeds where a run differs from TRL's at 5 %, judged by the last steps alone."""

    def differ(figures: Figures) -> bool:
        curves = [figures[f"gold, {each}"] for each in (name, "TRL")]
        steps = zip(*(last_steps(curve) for curve in curves), strict=True)
        return mean_with_interval([a - b for a, b in steps]).excludes_zero

    return sum(map(differ, found.values()))


def last_steps(curve: object) -> Sequence[float]:
    """Return the counted end of a curve."""
    assert isinstance(curve, list)
    return curve[-COUNTED:]


def judge(found: Mapping[int, Figures]) -> Verdict:
    """Look whether the mean difference over the seeds lies within the margin."""
    end = "gold of the last steps"
    ours = difference(found, f"{end}, ours", f"{end}, TRL")
    same = difference(found, f"{end}, TRL again", f"{end}, TRL")
    words = (
        f"gold of the last steps, ours to TRL {told(ours)}, TRL with another seed to TRL "
        f"{told(same)}; by its last steps alone a pair of runs would differ in "
        f"{apart(found, 'ours')} and {apart(found, 'TRL again')} of {len(found)}"
    )
    return within(ours, MARGIN, words)


RESULT = PaperResult(
    title="Learning curves beside TRL's GRPO",
    source="TRL 1.16.0, GRPOTrainer, whose losses docs/loss_parity.md compares on fixed tensors",
    claim="From the same model, prompts, rewards and settings, two implementations of GRPO learn "
    "as fast.",
    criterion="experiment=gold_grpo at a constant rate, 28 steps of 32 prompts with 4 responses, "
    "two passes of two updates; TRL from the same SFT model on the same prompts. Mean gold of the "
    "responses of the last 14 steps, ours minus TRL's, paired by seed. Passed: its interval lies "
    "within ±0.04. Failed: it lies outside.",
    seeds=(1, 2, 3, 4, 5),
    minutes=3,
    measure=measure,
    judge=judge,
)
