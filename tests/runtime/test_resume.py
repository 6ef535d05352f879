"""A run that is killed inside its phases and resumed equals the run that never was."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf.gpu_check.runs import differing_files
from rlhf.run.phase_state import checkpoint_folders, find_latest_intact_checkpoint
from tests.killer import PATH
from tests.runs import EPISODES, ROOT, TINY_RUN, finished, launch, metrics, python, soaked, start
from tests.runtime.test_launcher import children
from tests.soak import EVERY_STEP, progress, soak

pytestmark = pytest.mark.slow

STEPS = ["sft.epochs=0.5", "reward.epochs=0.5", "ppo.steps=4", "checkpoint.every_steps=2"]
STEPS += [
    "ppo.eval_every=3",
    "ppo.sample_every=2",
    "ppo.eval_prompts=4",
    f"tracking.others=[{PATH}]",
]
# Two ranks, and no reward model to train: the first case has one.
TWO_RANKS = ["hardware.ranks_per_node=2", "phase.order=[sft,ppo]", "model@reward_model=gold"]
TWO_RANKS += ["sft.epochs=0.1"]
# One run of each way to keep weights, masters, moments and averages; tests/soak_matrix.py has all.
CASES = {
    "torch, fp32 and all options": [
        "zero=stage0",
        "ppo.scale_reward=running",
        "ppo.lr_guard_kl=0.01",
        "ppo.actor_dropout=0.1",
        "sft.eval_every=2",
        "ppo.actor_freeze_steps=3",
    ],
    "torch, bf16": ["hardware.dtype=bf16", "zero=stage2", "ppo.ema_beta=0.9", "ppo.kl_target=1"],
    "trunk": ["ppo.shared_trunk=true", "ppo.num_layers_unfrozen=1", "ppo.ema_beta=0.9"],
    "DeepSpeed, stage 0": ["zero=stage0", *TWO_RANKS],
    "DeepSpeed, stage 2, bf16": [
        *("zero=stage2", "zero.engine=deepspeed", "hardware.dtype=bf16"),
        *TWO_RANKS[1:],
    ],
    "DeepSpeed, stage 3, averages": ["zero=stage3", *TWO_RANKS, "ppo.ema_beta=0.9"],
    "episodes": [*EPISODES, "ppo.gae_unit=turn"],
    "sampled ahead, beside training": [
        *("rollout.lag=2", "rollout.overlap=true", "hardware.cores_per_rank=1"),
    ],
    "LoRA and DPO": ["lora=default", "phase=pipeline_dpo"],
}
LEFT_TO_SOAK = (
    "torch, bf16",
    "trunk",
    "DeepSpeed, stage 0",
    "DeepSpeed, stage 3, averages",  # two ranks of stage 3 are stopped in every phase there
    "sampled ahead, beside training",
)


@pytest.mark.parametrize("case", soaked(CASES, *LEFT_TO_SOAK))
def test_killed_run_equals_the_run_that_never_was(case: str, tmp_path: Path) -> None:
    overrides = [*STEPS, *CASES[case]]
    whole = finished(tmp_path / "whole", *overrides, PYTHONPATH=ROOT)
    phases = list(json.loads((whole / "result.json").read_text())["phases"])
    killed = tmp_path / "killed"
    words = [*TINY_RUN, *overrides, f"run_dir={killed}"]
    # Every phase once, the last phase in every case: it has the most kinds of state.
    for phase in phases if case == next(iter(CASES)) else phases[-1:]:
        run = launch(*words, cwd=tmp_path, PYTHONPATH=ROOT, KILL_AT=f"{phase}:4")
        assert run.returncode != 0, f"killed in {phase}"
        words = [f"resume={killed}"]
    run = launch(*words, cwd=tmp_path, PYTHONPATH=ROOT)
    assert run.returncode == 0, run.stderr
    assert f"{phases[-1]}: continues after step 2" in run.stdout
    assert differing_files(killed, whole) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_ends_a_run_after_its_step(ranks: int, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    endless = ["phase=sft", "sft.epochs=9999", f"hardware.ranks_per_node={ranks}"]
    process = start_run(run_dir, *endless)
    started = children(process.pid)
    process.send_signal(signal.SIGTERM)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    way_on = f"interrupted; python launch.py resume={run_dir} continues the run"
    assert complaint.splitlines()[-1] == way_on
    found = find_latest_intact_checkpoint(run_dir / "sft", lambda _: None)
    assert found is not None
    assert found.step == metrics(run_dir)[-1]["step"] > 0
    assert (run_dir / "report.html").exists()
    wait_for(lambda: not any(map(is_there, started)), seconds=10)


def test_sigusr1_asks_for_a_checkpoint_only(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_run(run_dir, "phase=sft", "sft.epochs=9999")
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: bool(checkpoint_folders(run_dir / "sft")))
    steps = len(metrics(run_dir))
    wait_for(lambda: len(metrics(run_dir)) > steps)
    process.kill()
    process.communicate()


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


def wait_for(happened: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something has happened."""
    patience = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < patience
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    """True while a process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_other_ranks_and_stages_continue_a_run(tmp_path: Path) -> None:
    """Not bit for bit, but with the same batches: nearly the same metrics."""
    steps = [*STEPS, "phase=sft", "zero=stage0"]
    whole = finished(tmp_path / "whole", *steps, PYTHONPATH=ROOT)
    moved = tmp_path / "moved"
    words = [*TINY_RUN, *steps, f"run_dir={moved}"]
    assert launch(*words, cwd=tmp_path, PYTHONPATH=ROOT, KILL_AT="sft:4").returncode != 0
    other = ["zero=stage3", "hardware.ranks_per_node=2"]
    run = launch(f"resume={moved}", *other, cwd=tmp_path, PYTHONPATH=ROOT)
    assert run.returncode == 0, run.stderr
    assert "zero.stage=3" in run.stderr
    assert "sums round differently: no longer equal bit for bit" in run.stderr
    losses = [[m["sft/loss"] for m in metrics(r) if "sft/loss" in m] for r in (whole, moved)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_same_command_with_resume_auto_continues(tmp_path: Path) -> None:
    words = [*TINY_RUN, *STEPS, "phase=sft", "resume=auto"]
    assert launch(*words, cwd=tmp_path, PYTHONPATH=ROOT, KILL_AT="sft:4").returncode != 0
    run = launch(*words, cwd=tmp_path, PYTHONPATH=ROOT)
    assert "sft: continues after step 2" in run.stdout
    runs = tmp_path / "runs"
    assert len(list(runs.glob("smoke/*/config.yaml"))) == 1
    launch(*words, "seed=2", cwd=tmp_path, PYTHONPATH=ROOT, KILL_AT="sft:1")
    assert len(list(runs.glob("smoke/*/config.yaml"))) == 2, "another command, another run"
    launch(*words, cwd=tmp_path, PYTHONPATH=ROOT, KILL_AT="sft:1")
    assert len(list(runs.glob("smoke/*/config.yaml"))) == 3, "the first one has finished"


def test_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    overrides = ["sft.epochs=0.5", "reward.epochs=0.5", "ppo.steps=5"]  # make soak kills a hundred
    whole, killed = finished(tmp_path / "whole", *overrides), tmp_path / "killed"
    said: list[str] = []
    words = [*TINY_RUN, *overrides, *EVERY_STEP, f"run_dir={killed}"]
    soak(killed, words, kills=2, lines=progress(whole), seed=1, say=said.append)
    assert len(said) == 2, said
    assert differing_files(killed, whole) == [], said


def test_the_best_checkpoint_is_kept_ends_the_phase_and_can_be_exported(tmp_path: Path) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "exported"
    best = ["checkpoint.best=ppo/eval_score", "checkpoint.load_best=true", "ppo.eval_every=1"]
    more = ["checkpoint.keep_finished=true", "checkpoint.patience=2", "ppo.ema_beta=0.5"]
    finished(run_dir, *best, *more, "ppo.steps=6", "ppo.actor_lr=1e-2")
    scores = [m["ppo/eval_score"] for m in metrics(run_dir) if "ppo/eval_score" in m][1:]
    step = 1 + scores.index(max(scores))
    assert len(scores) == min(step + 2, 6), "two evaluations without a new best"
    state = run_dir / "ppo" / "state" / f"step-{step:08}"
    assert state in checkpoint_folders(run_dir / "ppo")
    size = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
    planned = json.loads((run_dir / "plan.json").read_text())["checkpoints_gb"]
    assert 3 * size / 1e9 == pytest.approx(planned, rel=0.1), "latest, best, and the next"
    words = ["-m", "rlhf.export", run_dir, "--phase", "ppo", "--checkpoint", step, "--out"]
    run = python(*words, folder, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    weights = "model.safetensors"
    assert (folder / weights).read_bytes() == (run_dir / "ppo/actor" / weights).read_bytes()
    average = tmp_path / "average"
    assert python(*words, average, "--average", cwd=tmp_path).returncode == 0
    assert (average / weights).read_bytes() != (folder / weights).read_bytes()
    again = python(*words, folder, cwd=tmp_path)
    assert (again.returncode, again.stderr) == (
        2,
        f"error: {folder} exists: choose another folder with --out FOLDER\n",
    )


def test_ppo_ends_when_it_has_left_its_reference(tmp_path: Path) -> None:
    run = launch(
        *TINY_RUN,
        *("ppo.steps=9", "ppo.stop_run_kl=0.001", "ppo.actor_lr=1e-2", "ppo.warmup_steps=0"),
        f"run_dir={tmp_path / 'run'}",
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    kls = [m["ppo/kl_to_reference"] for m in metrics(tmp_path / "run") if "ppo/kl_ctl" in m]
    assert len(kls) < 9
    assert kls[-1] > 0.001 >= max(kls[:-1])
    why = f"ppo/kl_to_reference={kls[-1]:.3g} is above ppo.stop_run_kl=0.001"
    assert f"ppo: ends after step {len(kls)}: {why}" in run.stdout


def test_gradients_that_stay_broken_end_the_run_and_name_what_was_good(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    broken = ["sft.epochs=9", "sft.lr=1e30", "sft.warmup_steps=0", "checkpoint.every_steps=1"]
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
    assert (
        f"python -m rlhf.export {run_dir} --phase sft --checkpoint {last_good} saves" in run.stderr
    )


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    overrides = ["phase=sft", "sft.epochs=0.7", "checkpoint.every_steps=1"]
    overrides += ["checkpoint.keep=2", f"tracking.others=[{PATH}]"]
    whole = finished(tmp_path / "whole", *overrides, PYTHONPATH=ROOT)
    killed = tmp_path / "killed"
    words = [*TINY_RUN, *overrides, f"run_dir={killed}"]
    launch(*words, cwd=tmp_path, PYTHONPATH=ROOT, KILL_AT="sft:5")
    assert steps_of(killed) == [4, 3]
    weights = checkpoint_folders(killed / "sft")[0] / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (killed / "sft" / "state" / ".step-00000009.building").mkdir()
    again = launch(f"resume={killed}", cwd=tmp_path, PYTHONPATH=ROOT, KILL_AT="sft:4")
    warning = f"warning: {weights} is damaged: it is not what was written. It is not used"
    assert warning in again.stdout
    assert "sft: continues after step 3" in again.stdout
    assert steps_of(killed) == [3], "nothing that a later step could be taken for"
    assert [path.name for path in (killed / "sft" / "state").iterdir()] == ["step-00000003"]
    assert launch(f"resume={killed}", cwd=tmp_path, PYTHONPATH=ROOT).returncode == 0
    assert differing_files(killed, whole) == []


def steps_of(run_dir: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoint_folders(run_dir / "sft")]
