"""Compare memory with the plan, look for growth over steps, and run out of memory on purpose.

Has the parts ``memory`` (whole phases, PPO steps in one process) and ``oom`` of rlhf.gpu_check.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rlhf.base.errors import USER_ERROR
from rlhf.config.freeze import load_frozen_config, load_run
from rlhf.config.machine_rates import GIB
from rlhf.gpu_check.rows import CheckRow, Size, Task, checked_row
from rlhf.gpu_check.runs import RUNS, SIDE_BY_SIDE, EndedRun, expand_words, planned_gib, run_to_end
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.run.tracker import Tracker

# Shares of the planned memory, and GiB that no plan counts: workspaces of cuBLAS (32 MiB per stream
# on Hopper, and two streams, since captures have their own) and partly used segments.
LEAST_SHARE, MOST_SHARE, SPARE_GIB = 0.7, 1.05, 0.1
# After step WARMUP one step may keep more bytes (a new CUDA graph), but not every step over SLACK.
STEPS, WARMUP, SLACK = 6, 2, 1 << 16
OOM_SHARE = 0.6  # share of the memory planned for SFT that torch may use in the part ``oom``
RETRY_TEXT = "continuing with smaller micro-batches"  # what launch.py prints at a retry


class LiveMemory(Tracker):
    """A tracker that writes the peak GiB of live tensors in each phase to a file beside the run."""

    def __init__(self, _: Any, run_dir: Path) -> None:
        self._file, self._gib = run_dir.with_suffix(".live.json"), dict[str, float]()

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002
        """Write the peaks so far."""
        self._gib[phase] = torch.cuda.max_memory_allocated() / GIB
        self._file.write_text(json.dumps(self._gib))


class LessMemory(Tracker):
    """A tracker that imitates a small GPU: torch may use OOM_SHARE of the memory planned for SFT.

    The limit stays the same when the run is retried, so smaller micro-batches may fit.
    """

    def __init__(self, _: Any, run_dir: Path) -> None:
        total = torch.cuda.get_device_properties(0).total_memory / GIB
        torch.cuda.set_per_process_memory_fraction(OOM_SHARE * planned_gib(run_dir, "sft") / total)


def check_memory(folder: Path, size: Size) -> Iterator[Task]:
    """Yield a task for each phase of each run, and one for PPO steps with models of the first."""
    # Small models fit beside each other; a full one may need the whole card.
    pool = SIDE_BY_SIDE if size is Size.tiny else ThreadPoolExecutor(1)
    runs: Mapping[str, str] = RUNS["memory"][size]
    started: list[Future[EndedRun]] = []
    for number, words in enumerate(runs.values(), start=1):
        run = partial(_run_on_trained, started[-1]) if "model=pretrained" in words else run_to_end
        started.append(pool.submit(run, folder / f"shape_{number}", f"FEW {words}"))
    for (name, words), run_future in zip(runs.items(), started, strict=True):
        for phase in ["sft"] if "phase=sft" in words else ["sft", "reward", "ppo"]:
            yield f"{name}: {phase}", partial(_compare_with_plan, run_future, phase)
    yield f"growth over {STEPS} PPO steps", partial(_check_growth, folder / "shape_1")


def _run_on_trained(earlier: Future[EndedRun], folder: Path, text: str) -> EndedRun:
    return run_to_end(folder, text, f"model.path={earlier.result().run_dir / 'sft' / 'model'}")


def _compare_with_plan(run: Future[EndedRun], phase: str) -> CheckRow:
    ended = run.result()
    measured = ended.phases[phase]["measured"]["memory_gib"]
    live = json.loads(ended.run_dir.with_suffix(".live.json").read_text())[phase]
    planned = planned_gib(ended.run_dir, phase)
    return checked_row(
        LEAST_SHARE * planned - SPARE_GIB <= measured <= MOST_SHARE * planned + SPARE_GIB,
        f"{measured:.3f} GiB, {live:.3f} of it live tensors; {measured / planned:.0%} of the plan",
        f"{LEAST_SHARE:.0%} to {MOST_SHARE:.0%} of {planned:.3f} GiB (± {SPARE_GIB} GiB)",
        measured_gib=measured,
        live_gib=live,
        planned_gib=planned,
    )


def _check_growth(run_dir: Path) -> CheckRow:
    """Take PPO steps with the models of a run; compare the bytes of live tensors after steps."""
    config = load_run(run_dir)
    engine = RLHFEngine(config)
    trainer = PPOTrainer(engine, config.ppo)
    texts = ["\n\nHuman: Say it.\n\nAssistant:"] * config.ppo.rollout_batch_size
    live = []
    for step in range(STEPS):
        trainer.train_rlhf(trainer.generate_experience(engine.prompts(texts, step=step)))
        live.append(torch.cuda.memory_allocated())
    growth = min(later - earlier for earlier, later in pairwise(live[WARMUP - 1 :]))
    return checked_row(
        growth <= SLACK,
        f"{live[WARMUP - 1] / GIB:.3f} GiB after step {WARMUP}, {live[-1] / GIB:.3f} at the end; "
        f"{growth / 2**10:+.0f} KiB or more in every step",
        f"at most {SLACK / 2**10:+.0f} KiB",
        growth_bytes=growth,
    )


def check_oom(folder: Path, size: Size) -> Iterator[Task]:
    """Yield two tasks: a run that must be retried, and a run that must end with an error."""
    words = RUNS["oom"][size]
    retried, stopped = (
        SIDE_BY_SIDE.submit(run_to_end, folder / on_oom, f"{words} hardware.on_oom={on_oom}")
        for on_oom in ("reduce_micro_batch", "stop")
    )
    yield "hardware.on_oom=reduce_micro_batch", partial(_check_retry, retried)
    (override,) = (word for word in expand_words(words) if word.startswith("sft.micro_batch_size="))
    yield "hardware.on_oom=stop", partial(_check_error, stopped, override)


def _check_retry(run: Future[EndedRun]) -> CheckRow:
    ended = run.result()
    sft, times = load_frozen_config(ended.finished_dir).sft, ended.output.count(RETRY_TEXT)
    return checked_row(
        times > 0 and sft.micro_batch_size is not None and sft.micro_batch_size < sft.batch_size,
        f"retried {times} times; micro-batch {sft.batch_size} became {sft.micro_batch_size}",
        "at least one retry, then the end of the run",
        retries=times,
        micro_batch=sft.micro_batch_size or 0,
    )


def _check_error(run: Future[EndedRun], override: str) -> CheckRow:
    ended, begin = run.result(), f"sft: out of memory with {override}"
    return checked_row(
        ended.code == USER_ERROR and ended.last_line.startswith(begin),
        f"exit code {ended.code}: {ended.last_line}",
        f"exit code {USER_ERROR}: {begin} ...",
    )
