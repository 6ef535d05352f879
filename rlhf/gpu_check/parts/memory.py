"""Compare the peak memory of whole phases with the planner's figure; look for growth over steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rlhf.config.freeze import load_run
from rlhf.config.machine_rates import GIB
from rlhf.gpu_check.rows import CheckSetting, Finding, Size, Task, checked_finding
from rlhf.gpu_check.runs import RUNS, SIDE_BY_SIDE, EndedRun, planned_gib, run_to_end
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.run.tracker import Tracker

# Shares of the plan, and GiB that no plan counts: workspaces of cuBLAS (32 MiB per stream on
# Hopper, and two streams, as captures have one of their own) and segments that are partly used.
LEAST, MOST, SPARE = 0.7, 1.05, 0.1
# Steps after KNOWN may keep more bytes, as of a graph for other rows, but not SLACK in each step.
STEPS, KNOWN, SLACK = 6, 2, 1 << 16


class LiveMemory(Tracker):
    """A tracker that writes the peak of live tensors in each phase, in GiB, beside the run."""

    def __init__(self, _: Any, run_dir: Path) -> None:
        self._file, self._gib = run_dir.with_suffix(".live.json"), dict[str, float]()

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002
        """Write the peaks so far."""
        self._gib[phase] = torch.cuda.max_memory_allocated() / GIB
        self._file.write_text(json.dumps(self._gib))


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield a task for each phase of each run, and one for steps with the first run's models."""
    # Small models fit beside each other; a full one may need the whole card.
    pool = SIDE_BY_SIDE if setting.size is Size.tiny else ThreadPoolExecutor(1)
    runs: Mapping[str, str] = RUNS["memory"][setting.size]
    started: list[Future[EndedRun]] = []
    for number, words in enumerate(runs.values(), start=1):
        run = partial(_run_on_trained, started[-1]) if "model=pretrained" in words else run_to_end
        started.append(pool.submit(run, setting.folder / f"shape_{number}", f"FEW {words}"))
    for (name, words), ended in zip(runs.items(), started, strict=True):
        for phase in ["sft"] if "phase=sft" in words else ["sft", "reward", "ppo"]:
            yield Task(f"{name}: {phase}", partial(_compare_with_plan, ended, phase))
    yield Task(f"growth over {STEPS} PPO steps", partial(_check_growth, setting.folder / "shape_1"))


def _run_on_trained(earlier: Future[EndedRun], folder: Path, text: str) -> EndedRun:
    return run_to_end(folder, text, f"model.path={earlier.result().run_dir / 'sft' / 'model'}")


def _compare_with_plan(run: Future[EndedRun], phase: str) -> Finding:
    ended = run.result()
    measured = ended.result["phases"][phase]["measured"]["memory_gib"]
    live = json.loads(ended.run_dir.with_suffix(".live.json").read_text())[phase]
    planned = planned_gib(ended.run_dir, phase)
    return checked_finding(
        LEAST * planned - SPARE <= measured <= MOST * planned + SPARE,
        f"{measured:.3f} GiB, {live:.3f} of it live tensors; {measured / planned:.0%} of the plan",
        f"{LEAST:.0%} to {MOST:.0%} of {planned:.3f} GiB (± {SPARE} GiB)",
        measured_gib=measured,
        live_gib=live,
        planned_gib=planned,
    )


def _check_growth(run_dir: Path) -> Finding:
    """Take PPO steps with the models of a run; compare the bytes of live tensors after steps."""
    config = load_run(run_dir)
    engine = RLHFEngine(config)
    trainer = PPOTrainer(engine, config.ppo)
    texts = ["\n\nHuman: Say it.\n\nAssistant:"] * config.ppo.rollout_batch_size
    live = []
    for step in range(STEPS):
        trainer.train_rlhf(trainer.generate_experience(engine.prompts(texts, step=step)))
        live.append(torch.cuda.memory_allocated())
    growth = min(later - earlier for earlier, later in pairwise(live[KNOWN - 1 :]))
    return checked_finding(
        growth <= SLACK,
        f"{live[KNOWN - 1] / GIB:.3f} GiB after step {KNOWN}, {live[-1] / GIB:.3f} after the last; "
        f"{growth / 2**10:+.0f} KiB or more in every step",
        f"at most {SLACK / 2**10:+.0f} KiB",
        growth_bytes=growth,
    )
