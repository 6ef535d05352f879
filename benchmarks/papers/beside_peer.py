"""Learning curves of one task, here and in another project, from the same model and prompts."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import BENCHMARKS, ROOT
from run_prompts import RunPrompts

from papers.claims import Figures, NotMeasurableError, Place, Verdict
from papers.paired import difference, told, within
from papers.started_runs import run_of
from rlhf import load_run
from rlhf.base.intervals import mean_with_interval

COUNTED = 14  # last steps, whose gold scores are compared
MARGIN = 0.04  # of the gold score
OTHER_SEED = 1000  # added to the seed for the peer's second run
END = "gold of the last steps"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another project: a script of this folder trains its model in an environment of its own."""

    name: str
    packages: str
    """What pip installs in the peer's environment."""
    variable: str
    """Of our environment: names the peer's interpreter."""
    script: str
    recipe: tuple[str, ...]
    """Overrides of our run; the script gets the settings that follow from them."""

    @property
    def needs(self) -> str:
        """Return what a reader sets up before."""
        return (
            f"`{self.variable}`: the python of an environment made by `pip install {self.packages}`"
        )

    def measure(self, seed: int, place: Place) -> Figures:
        """Return the gold score of each step's responses: ours, the peer's, the peer's again.

        Raises:
            NotMeasurableError: if the variable names no interpreter.
        """
        python = os.environ.get(self.variable, "")
        if not Path(python).is_file():
            raise NotMeasurableError(
                f"{self.variable}={python} is not there. The row needs {self.needs}"
            )
        ours = run_of(place, *self.recipe, seed=seed)
        task = task_of(ours)
        again = f"{self.name} again"
        curves = {"ours": scores(ours)}
        for name, number in ((self.name, seed), (again, seed + OTHER_SEED)):
            folder = place.folder / name.lower().replace(" ", "_")
            curves[name] = self._scores(python, {**task, "seed": number}, folder)
        found: Figures = {f"gold, {name}": curve for name, curve in curves.items()}
        ends = {name: statistics.fmean(curve[-COUNTED:]) for name, curve in curves.items()}
        return found | {f"{END}, {name}": end for name, end in ends.items()}

    def judge(self, found: Mapping[int, Figures]) -> Verdict:
        """Look whether the mean difference over the seeds lies within the margin."""
        peer, again = self.name, f"{self.name} again"
        ours = difference(found, f"{END}, ours", f"{END}, {peer}")
        same = difference(found, f"{END}, {again}", f"{END}, {peer}")
        words = (
            f"{END}, ours to {peer} {told(ours)}, {peer} with another seed to {peer} "
            f"{told(same)}; by its last steps alone a pair of runs would differ in "
            f"{self.apart(found, 'ours')} and {self.apart(found, again)} of {len(found)}"
        )
        return within(ours, MARGIN, words)

    def apart(self, found: Mapping[int, Figures], name: str) -> int:
        """Count seeds where a run differs from the peer's at 5 %, judged by last steps alone."""

        def differ(figures: Figures) -> bool:
            curves = [figures[f"gold, {each}"] for each in (name, self.name)]
            steps = zip(*(last_steps(curve) for curve in curves), strict=True)
            return mean_with_interval([a - b for a, b in steps]).excludes_zero

        return sum(map(differ, found.values()))

    def _scores(self, python: str, task: Mapping[str, object], folder: Path) -> list[float]:
        """Return the mean score of each step of the peer's run in ``folder``."""
        folder.mkdir(exist_ok=True)
        file = folder / "task.json"
        file.write_text(json.dumps({**task, "folder": str(folder)}))
        path = os.pathsep.join(map(str, (ROOT, BENCHMARKS)))
        script = BENCHMARKS / "papers" / self.script
        environment = os.environ | {"PYTHONPATH": path}
        subprocess.run([python, str(script), str(file)], check=True, env=environment)
        return [statistics.fmean(each) for each in json.loads((folder / "gold.json").read_text())]


def task_of(run_dir: Path) -> dict[str, object]:
    """Return what a peer needs to know of the run: its SFT model, prompts and settings."""
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
        "critic_rate": ppo.critic_lr,
        "penalty": ppo.kl_ctl,
        "cliprange": ppo.cliprange,
        "lam": ppo.lam,
        "rank": config.lora.rank,
        "alpha": config.lora.alpha,
    }


def scores(run_dir: Path) -> list[float]:
    """Return the mean score of the rollout of each step."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["ppo/score_mean"] for row in rows if "ppo/score_mean" in row]


def last_steps(curve: object) -> Sequence[float]:
    """Return the counted end of a curve."""
    assert isinstance(curve, list)
    return curve[-COUNTED:]
