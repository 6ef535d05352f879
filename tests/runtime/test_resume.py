"""A run that is killed inside its phases and resumed equals the run that never was."""

import json
import signal
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from rlhf.export import main as export
from rlhf.gpu_check.runs import differing_files
from rlhf.run.phase_state import checkpoint_folders, find_latest_intact_checkpoint
from tests.cheats import edit_json
from tests.killer import PATH
from tests.runs import (
    KEEP_ALL,
    ROOT,
    TINY_RUN,
    children,
    finished,
    flip,
    launch,
    metrics,
    python,
    start,
    unfinished_copy,
    wait_for,
)

pytestmark = pytest.mark.slow

STEPS = ["sft.epochs=0.5", "reward.epochs=0.5", "ppo.steps=4", "checkpoint.every_steps=2"]
STEPS += ["ppo.eval_every=3", "ppo.sample_every=2", "ppo.eval_prompts=4"]
ALL_OPTIONS = ["zero=stage0", "ppo.scale_reward=running", "ppo.lr_guard_kl=0.01"]
ALL_OPTIONS += ["ppo.actor_dropout=0.1", "sft.eval_every=2", "ppo.actor_freeze_steps=3"]
# Some ways to keep weights, masters, moments and averages; tests/soak_matrix.py has all, and
# tests/options/environments/test_environment_run.py resumes episodes.
CASES = {
    "DeepSpeed, stage 2, bf16": [
        *("zero=stage2", "zero.engine=deepspeed", "hardware.dtype=bf16", "sft.epochs=0.1"),
        *("phase.order=[sft,ppo]", "model@reward_model=gold"),  # no reward model to train
        *("ppo.reference_every=2", "ppo.teacher_prompt_column=answer"),  # a teacher that moves
    ],
    "LoRA and DPO": [
        *("lora=default", "phase=pipeline_dpo", "dpo.batch_size=16", "dpo.epochs=0.2"),
        *("dpo.eval_prompts=4", "dpo.eval_examples=8"),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_continued_run_equals_the_run_that_never_was_stopped(case: str, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    finished(whole, *STEPS, *CASES[case], *KEEP_ALL)
    phase = list(json.loads((whole / "result.json").read_text())["phases"])[-1]
    unfinished_copy(whole, stopped, phase, after_step=2)
    run = launch(f"resume={stopped}", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert f"{phase}: continues after step 2" in run.stdout
    assert differing_files(stopped, whole) == []


@pytest.mark.parametrize("every", [2, 9])
def test_a_run_with_more_steps_equals_one_that_began_with_them(every: int, tmp_path: Path) -> None:
    """Its last checkpoint is kept; if none was written, it cannot continue."""
    words = ["sft.epochs=0.1", "reward.epochs=0.1", "ppo.lr_schedule=constant"]
    words += [f"checkpoint.every_steps={every}", "ppo.eval_every=3", "plan=check"]
    short = finished(tmp_path / "short", *words, "ppo.steps=3")
    more = launch(f"resume={short}", "ppo.steps=5", cwd=tmp_path)
    if every > 3:
        assert more.returncode == 2
        assert "PPO has finished, and none of its checkpoints is kept" in more.stderr
        assert (short / "result.json").exists()
        return
    assert more.returncode == 0, more.stderr
    assert "plan: ZeRO stage 1, " in more.stderr
    assert more.stderr.count("ppo 5 steps of ") == 1
    assert "ppo.steps=3" not in (short / "command.txt").read_text()
    whole = finished(tmp_path / "whole", *words, "ppo.steps=5")
    assert differing_files(short, whole) == []
    assert [each.name for each in checkpoint_folders(short / "ppo")] == ["step-00000004"]


def test_run_that_is_killed_in_every_phase_equals_the_run_that_never_was(tmp_path: Path) -> None:
    words = [*STEPS, *ALL_OPTIONS, f"tracking.others=[{PATH}]"]
    whole = finished(tmp_path / "whole", *words, PYTHONPATH=ROOT)
    killed = tmp_path / "killed"
    trained_at = 0
    words = [*TINY_RUN, *words, f"run_dir={killed}"]
    for phase in ("sft", "reward", "ppo"):
        run = launch(*words, cwd=tmp_path, PYTHONPATH=ROOT, KILL_AT=f"{phase}:4")
        assert run.returncode == -signal.SIGKILL, f"killed in {phase}"
        words = [f"resume={killed}"]
        if phase == "reward":
            trained_at = (killed / "sft/model/model.safetensors").stat().st_mtime_ns
    run = launch(*words, cwd=tmp_path, PYTHONPATH=ROOT)
    assert run.returncode == 0, run.stderr
    assert "ppo: continues after step 2" in run.stdout
    assert (killed / "sft/model/model.safetensors").stat().st_mtime_ns == trained_at
    assert differing_files(killed, whole) == []


def test_sigterm_ends_two_ranks_after_their_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_run(run_dir, "phase=sft", "sft.epochs=9999", "hardware.ranks_per_node=2")
    assert_ends_after_its_step(process, run_dir)


def test_sigusr1_asks_for_a_checkpoint_and_sigterm_ends_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_run(run_dir, "phase=sft", "sft.epochs=9999")
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: bool(checkpoint_folders(run_dir / "sft")))
    steps = len(metrics(run_dir))
    wait_for(lambda: len(metrics(run_dir)) > steps)
    assert_ends_after_its_step(process, run_dir)


def assert_ends_after_its_step(process: subprocess.Popen[str], run_dir: Path) -> None:
    started = children(process.pid)
    process.send_signal(signal.SIGTERM)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    way_on = f"interrupted; rlhf resume={run_dir} continues the run"
    assert complaint.splitlines()[-1] == way_on
    found = find_latest_intact_checkpoint(run_dir / "sft", lambda _: None)
    assert found.step == metrics(run_dir)[-1]["step"] > 0
    assert (run_dir / "report.html").exists()
    wait_for(lambda: not any(map(is_there, started)), seconds=10)


def test_a_step_that_does_not_end_in_time_is_given_up(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    slow = ["tracking.others=[tests.killer:Sleeper]", "checkpoint.grace_seconds=1"]
    process = start_run(run_dir, "phase=sft", *slow, file="asleep", PYTHONPATH=ROOT)
    process.send_signal(signal.SIGTERM)
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in complaint


def start_run(
    run_dir: Path, *overrides: str, file: str = "metrics.jsonl", **environment: Any
) -> subprocess.Popen[str]:
    """Start a run, and return it as soon as it has written ``file``."""
    words = [ROOT / "launch.py", *TINY_RUN, *overrides, f"run_dir={run_dir}"]
    process = start(*words, cwd=run_dir.parent, **environment)
    wait_for(lambda: (run_dir / file).exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    return process


def is_there(pid: int) -> bool:
    """True while a process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_other_ranks_and_stages_continue_a_run(tmp_path: Path) -> None:
    """Not bit for bit, but with the same batches: nearly the same metrics."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    finished(whole, *STEPS, "phase=sft", "zero=stage0", *KEEP_ALL)
    unfinished_copy(whole, moved, "sft", after_step=2)
    other = ["zero=stage3", "hardware.ranks_per_node=2"]
    run = launch(f"resume={moved}", *other, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "sft: continues after step 2" in run.stdout
    assert "zero.stage=3" in run.stderr
    assert "sums round differently: no longer equal bit for bit" in run.stderr
    losses = [[m["sft/loss"] for m in metrics(r) if "sft/loss" in m] for r in (whole, moved)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_same_command_with_resume_auto_continues(tmp_path: Path) -> None:
    words = [*TINY_RUN, *STEPS, "phase=sft", "resume=auto", f"tracking.others=[{PATH}]"]
    assert launch(*words, cwd=tmp_path, PYTHONPATH=ROOT, KILL_AT="sft:4").returncode != 0
    run = launch(*words, cwd=tmp_path, PYTHONPATH=ROOT)
    assert "sft: continues after step 2" in run.stdout
    runs = tmp_path / "runs"
    assert len(list(runs.glob("smoke/*/config.yaml"))) == 1
    launch(*words, cwd=tmp_path, PYTHONPATH=ROOT, KILL_AT="sft:1")
    assert len(list(runs.glob("smoke/*/config.yaml"))) == 2, "the first one has finished"


def test_the_best_checkpoint_is_kept_ends_the_phase_and_can_be_exported(tmp_path: Path) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "exported"
    best = ["checkpoint.best=ppo/eval_score", "checkpoint.load_best=true", "ppo.eval_every=1"]
    more = ["checkpoint.keep_finished=true", "checkpoint.patience=2", "ppo.ema_beta=0.5"]
    more += ["ppo.reference_every=1", "ppo.reference_share=0.1"]
    finished(run_dir, *best, *more, "ppo.steps=6", "ppo.actor_lr=1e-2", "plan=check")
    scores = [m["ppo/eval_score"] for m in metrics(run_dir) if "ppo/eval_score" in m][1:]
    step = 1 + scores.index(max(scores))
    assert len(scores) == min(step + 2, 6), "two evaluations without a new best"
    state = run_dir / "ppo" / "state" / f"step-{step:08}"
    assert state in checkpoint_folders(run_dir / "ppo")
    size = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
    planned = json.loads((run_dir / "plan.json").read_text())["checkpoints_gb"]
    assert 3 * size / 1e9 == pytest.approx(planned, rel=0.1), "latest, best, and the next"
    words = [str(run_dir), "--phase", "ppo", "--checkpoint", str(step), "--out"]
    assert export([*words, str(folder)]) == 0
    weights = "model.safetensors"
    assert (folder / weights).read_bytes() == (run_dir / "ppo/actor" / weights).read_bytes()
    average = tmp_path / "average"
    assert export([*words, str(average), "--average"]) == 0
    assert (average / weights).read_bytes() != (folder / weights).read_bytes()
    again = python("-m", "rlhf.export", *words, folder)
    assert (again.returncode, again.stderr) == (
        2,
        f"error: {folder} exists: choose another folder with --out FOLDER\n",
    )


def test_gradients_that_stay_broken_end_the_run_and_name_what_was_good(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    broken = ["sft.epochs=2", "sft.lr=1e30", "sft.warmup_steps=0", "checkpoint.every_steps=1"]
    broken += ["alarms.stop=[]"]  # by default the alarm not_finite ends the run one step earlier
    words = [*TINY_RUN, *broken, "checkpoint.most_skipped=3", f"run_dir={run_dir}"]
    run = launch(*words, cwd=tmp_path)
    assert run.returncode == 2
    skipped = [m["sft/skipped_steps"] for m in metrics(run_dir) if "sft/skipped_steps" in m]
    assert skipped[-3:] == [1.0, 1.0, 1.0]
    last_good = len(skipped) - 3
    why = f"no optimizer step could be taken in 3 steps in a row up to step {len(skipped)}"
    assert f"error: sft: {why}, since gradients were not finite" in run.stderr
    assert steps_of(run_dir) == [last_good]
    assert f"rlhf export {run_dir} --phase sft --checkpoint {last_good} exports" in run.stderr


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    words = ["phase=sft", "checkpoint.every_steps=1", "checkpoint.keep=2"]
    finished(whole, *words, "checkpoint.keep_finished=true")
    last, before = steps_of(whole)
    unfinished_copy(whole, stopped, "sft", after_step=last)
    state = stopped / "sft" / "state"
    weights = checkpoint_folders(stopped / "sft")[0] / "model" / "model.safetensors"
    flip(weights, 0.99)
    (state / f".step-{last + 4:08}.building").mkdir()
    edit_json(
        stopped / "attempts.json", lambda a: a["attempts"][-1]["environment"].update(torch="1.0")
    )
    run = launch(f"resume={stopped}", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    damage = f"{weights} is damaged: it is not what was written. The checkpoint is not used"
    assert f"warning: {damage}" in run.stdout
    assert f"resumed with torch {version('torch')}, before 1.0: results may differ" in run.stdout
    assert f"sft: continues after step {before}" in run.stdout
    assert {path.name for path in state.iterdir()} == {f"step-{n:08}" for n in (before, last)}
    assert differing_files(stopped, whole) == []


def steps_of(run_dir: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoint_folders(run_dir / "sft")]
