"""Run all that a GPU can answer, in calls of a few minutes: what fails, and what it takes.

    python benchmarks/on_gpu.py OUT_FOLDER [--minutes 9] [--model FOLDER --data FILE] [--only PART]

Parts: ``check``, all of ``python -m rlhf.gpu_check``; ``settings``, SFT and PPO with each option
that is on by default switched off, whose losses must be alike; ``ranks``, the same on two GPUs;
``trl``, TRL's PPO beside ours at equal work; ``real``, a model from pretrained to PPO on real
preferences (--model and --data). A part that cannot run says why. Each run is a folder of
OUT_FOLDER; after each run OUT_FOLDER/on_gpu.md and on_gpu.json have all results. The same command
continues with the parts that have not ended. Exit code 0: nothing failed; 1: a run failed; 3: time
was up before the last part.

``--size tiny`` takes models of about 10,000 weights, for the GPU that the tests emulate:

    python -m tests.pretend_cuda --machine 2xa100 benchmarks/on_gpu.py OUT_FOLDER --size tiny
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
SECONDS = ("generate", "score", "train", "step")
UNFINISHED = 3  # exit code: the same command goes on
KILLED = -signal.SIGKILL  # the exit code of a run that was late

# Random weights: what a step takes does not depend on them. Rewards by a rule need no other model.
COMMON = (
    "tracking=local reuse.phases=never hardware=auto hardware.ranks_per_node=1 zero=stage1 "
    "phase.order=[sft,ppo] model@reward_model=gold data.size=2000 sft.epochs=0.05 "
    "sft.warmup_steps=1 sft.eval_examples=8 ppo.warmup_steps=1 ppo.eval_prompts=8 "
    "ppo.actor_lr=1e-6"
).split()
SIZES = {
    "full": (
        "model=llama3.2_1b model.init=random model.path=null ppo.steps=6 ppo.ppo_epochs=1 "
        "ppo.rollout_batch_size=128 ppo.mini_batch_size=128 rollout.min_response_tokens=256 "
        "rollout.max_response_tokens=256"
    ).split(),
    "tiny": (
        "experiment=smoke data.size=600 ppo.steps=3 rollout.max_response_tokens=8 "
        "model=llama3.2_1b model.init=random model.path=null model.vocab_size=400 "
        "model.architecture.vocab_size=400 model.architecture.hidden_size=32 "
        "model.architecture.intermediate_size=64 model.architecture.num_hidden_layers=2 "
        "model.architecture.num_attention_heads=4 model.architecture.num_key_value_heads=2"
    ).split(),
}
# The options that these steps switch off, each alone.
SETTINGS = {
    "as by default": "",
    "logits rounded": "hardware.fp32_logits=never",
    "layers by torch": "fused_layers=none",
    "no CUDA graphs": "rollout.cuda_graphs=false",
    "kernels by torch": "hardware.kernels=off",
    "compiled layers": "fused_layers=none model.compile=true",
}
COMPILED = ("layers by torch", "kernels by torch", "compiled layers")
RANKS = {
    "two ranks, stage 1": "zero=stage1",
    "two ranks, stage 3": "zero=stage3",
    "two ranks, sampling beside training": "rollout.lag=1",
}


@dataclass
class Run:
    """A command, and what it left."""

    part: str
    name: str
    command: list[str]
    folder: Path | None = None  # of a run of launch.py
    skipped: str = ""
    result: dict[str, Any] = field(default_factory=dict)


def list_runs(out: Path, options: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs of all parts, in the order of their worth."""
    folder = out / f"check_{len(list(out.glob('check_*')))}"  # a call that was late leaves one
    check = [PYTHON, "-m", "rlhf.gpu_check", str(folder), "--size", options.size]
    yield Run("check", "gpu_check", [*check, "--minutes", str(options.minutes)])
    common = [*COMMON, *SIZES[options.size]]
    for name, words in SETTINGS.items():
        run = _launch("settings", name, out, [*common, *words.split()])
        if options.size == "tiny" and name in COMPILED:
            run.skipped = "an emulated GPU runs no compiled kernels, with or without them"
        yield run
    few = "" if count_gpus() > 1 else "there is one GPU"
    for name, words in RANKS.items():
        run = _launch("ranks", name, out, [*common, "hardware.ranks_per_node=2", *words.split()])
        run.skipped = few
        yield run
    missing = "" if find_spec("trl") else "trl is not installed (pip install trl==1.12.0)"
    if options.size == "tiny":
        missing = "TRL does not run on an emulated GPU"
    steps = [PYTHON, str(ROOT / "benchmarks" / "ppo_step.py"), "--shape", "opt125m"]
    steps += ["--device", "cuda", "--dtype", "bf16", "--peer", "trl", "--peer-python", PYTHON]
    yield Run("trl", "PPO steps beside TRL's", steps, skipped=missing)
    words = ["experiment=smollm2_hh", "tracking=local", "hardware=auto", "zero=stage1"]
    words += [f"model.path={options.model}", f"data.path={options.data}"]
    real = _launch("real", "SmolLM2 from pretrained to PPO", out, words)
    if options.model is None or options.data is None:
        real.skipped = "--model FOLDER and --data FILE are not given"
    yield real


def _launch(part: str, name: str, out: Path, words: list[str]) -> Run:
    folder = out / part / name.replace(" ", "_").replace(",", "")
    words = list({word.partition("=")[0]: word for word in words}.values())  # the last of a key
    command = [PYTHON, str(ROOT / "launch.py"), *words, f"run_dir={folder}", "resume=auto"]
    return Run(part, name, command, folder)


def count_gpus() -> int:
    """Return the number of GPUs that torch can use."""
    import torch

    return torch.cuda.device_count()


def execute(run: Run, log: Path, seconds: float) -> None:
    """Run the command for at most ``seconds``; keep its output in ``log``, and its result."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                run.command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
            )
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too
            code = process.wait()
    run.result = {"code": code, "seconds": round(time.monotonic() - began, 1)}
    if run.folder is not None and code == 0:
        run.result |= read_figures(run.folder)


def read_figures(folder: Path) -> dict[str, Any]:
    """Return what a run of launch.py took and gave: medians of its PPO steps after the first."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "ppo" and "time/step_seconds" in line]
    plan = json.loads((folder / "plan.json").read_text())["phases"]["ppo"]["step_seconds"]
    later = steps[1:] or steps
    figures: dict[str, Any] = {
        f"{part} s": statistics.median(line[f"time/{part}_seconds"] for line in later)
        for part in SECONDS
        if f"time/{part}_seconds" in steps[0]
    }
    figures["planned step s"] = sum(plan.values())
    names = ("ppo/logprob_mismatch", "ppo/logprob_mismatch_share", "ppo/logprob_mismatch_max")
    names += ("ppo/actor_loss", "ppo/critic_loss", "time/peak_memory_gib")
    figures |= {name: steps[0][name] for name in names if name in steps[0]}
    losses = [line["sft/loss"] for line in lines if "sft/loss" in line]
    figures |= {"sft/loss": losses[-1]} if losses else {}
    figures["objective"] = json.loads((folder / "result.json").read_text())["objective"]
    return figures


def write(out: Path, runs: list[Run]) -> None:
    """Write the results so far, as JSON and as a page."""
    rows = {f"{run.part}: {run.name}": run.result or {"skipped": run.skipped} for run in runs}
    rows = {name: row for name, row in rows.items() if row.get("skipped") != ""}
    (out / "on_gpu.json").write_text(json.dumps(rows, indent=1))
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    page = ["# What a GPU answered", "", f"| run | {' | '.join(names)} |"]
    page.append(f"| --- |{' --- |' * len(names)}")
    for name, row in rows.items():
        cells = (row.get(key, "") for key in names)
        shown = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells)
        page.append(f"| {name} | {' | '.join(shown)} |")
    (out / "on_gpu.md").write_text("\n".join([*page, ""]))


def main() -> int:
    """Run the parts that have not ended; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, usage=__doc__.split("\n\n")[1].strip())
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    out, end = options.out.absolute(), time.monotonic() + 60 * options.minutes
    out.mkdir(parents=True, exist_ok=True)
    stored = out / "on_gpu.json"
    known = json.loads(stored.read_text()) if stored.exists() else {}
    runs = [run for run in list_runs(out, options) if not options.only or run.part in options.only]
    for run in runs:
        row = known.get(f"{run.part}: {run.name}", {})
        run.result = row if row.get("code") == 0 else {}
    is_late = False
    for run in runs:
        left = end - time.monotonic()
        if not run.result and not run.skipped and left > 0:
            print(f"{run.part}: {run.name}", flush=True)
            execute(run, out / "logs" / f"{run.part}_{run.name.replace(' ', '_')}.log", left)
            print(f"  {run.result}", flush=True)
        is_late |= not run.skipped and run.result.get("code", KILLED) == KILLED
        write(out, runs)
    for run in runs:
        if run.skipped:
            print(f"{run.part}: {run.name}: cannot run here: {run.skipped}")
    print(f"wrote {out / 'on_gpu.md'}")
    failed = [run.name for run in runs if run.result.get("code", 0) not in (0, KILLED)]
    if failed:
        print(f"failed: {', '.join(failed)}; see {out / 'logs'}")
    return 1 if failed else UNFINISHED if is_late else 0


if __name__ == "__main__":
    sys.exit(main())
