"""Compare a run that is killed in a PPO step and resumed with a run that nobody killed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rlhf.config.choices import Device, Dtype
from rlhf.engine.devices import resolve_dtype
from rlhf.gpu_check.equal_runs import differing_files
from rlhf.gpu_check.hooks import KILL_ONCE, killed_marker_file
from rlhf.gpu_check.rows import CheckSetting, Finding, RowVerdict, Task
from rlhf.gpu_check.runs import TINY_RUN, resume_run, start_run

WORDS = (
    *("hardware=auto", "phase.order=[sft,ppo]", "model@reward_model=gold"),
    *("checkpoint.every_steps=1", f"tracking.others=[{KILL_ONCE}]"),
)
EXPECTED = "equal bit for bit: weights, metrics, samples"


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield a task for each engine."""
    places = {"DeepSpeed, stage 2": ("zero=stage2", "zero.engine=deepspeed")}
    if resolve_dtype(Dtype.auto, Device.cuda) is Dtype.bf16:  # fp16 needs DeepSpeed
        places = {"torch, stage 1": ("zero=stage1", "zero.engine=torch"), **places}
    for name, words in places.items():
        folder = setting.folder / words[0].partition("=")[2]
        yield Task(name, partial(_compare_with_killed_run, folder, (*TINY_RUN, *WORDS, *words)))


def _compare_with_killed_run(folder: Path, words: tuple[str, ...]) -> Finding:
    folder.mkdir()
    killed = start_run(folder / "killed", *words)
    if not killed.code or not killed_marker_file(killed.run_dir).exists():
        return Finding(figure="it was not killed", expected=EXPECTED, verdict=RowVerdict.failed)
    _ = resume_run(killed.run_dir).result  # a run that failed raises here
    whole = _run_without_kill(folder / "whole", words)
    if not (found := differing_files(killed.run_dir, whole)):
        return Finding(figure="equal", expected=EXPECTED, verdict=RowVerdict.passed)
    # If two runs without a kill differ too, nondeterministic kernels are the reason, not resuming.
    if differing_files(_run_without_kill(folder / "again", words), whole):
        return Finding(
            figure="two runs that nobody killed differ too: this GPU's kernels add in any order",
            expected=EXPECTED,
            verdict=RowVerdict.skipped,
        )
    return Finding(
        figure=f"different: {', '.join(found)}", expected=EXPECTED, verdict=RowVerdict.failed
    )


def _run_without_kill(run_dir: Path, words: tuple[str, ...]) -> Path:
    """Run without a kill; return the run directory."""
    killed_marker_file(run_dir).touch()
    ended = start_run(run_dir, *words)
    _ = ended.result  # a run that failed raises here
    return run_dir
