"""python -m rlhf.replay: steps of a run are taken again, and compared bit for bit."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf import replay
from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.config.choices import Phase
from rlhf.replay import Replay, compare_logs, plan_replay
from rlhf.run.phase_state import write_checkpoint
from tests.cheats import copy_run
from tests.runs import ROOT, finished, python

STEPS = ["ppo.steps=5", "checkpoint.every_steps=2", "checkpoint.keep=9"]
STEPS += ["checkpoint.keep_finished=true", "checkpoint.digest_every=1"]
TENSOR = "critic/pretrained.gpt_neox.embed_in.weight"


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which one weight of the critic was changed after PPO step 3."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    others = "tracking.others=[tests.killer:Disturber]"
    return finished(run_dir, *STEPS, others, PYTHONPATH=ROOT, DISTURB_AT="ppo:3")


def test_sigterm_removes_the_temporary_folder(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from rlhf.replay import *\n"
        "with create_replay_folder(None, beside=Path(sys.argv[1], 'run')) as folder:\n"
        "    assert folder.is_dir(); os.kill(os.getpid(), signal.SIGTERM); signal.pause()"
    )
    assert python("-c", code, tmp_path).returncode == 128 + signal.SIGTERM
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_equal_steps_are_equal(disturbed: Path) -> None:
    found = python("-m", "rlhf.replay", disturbed, "--step", 5, PYTHONPATH=ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "ppo: continues after step 4" in found.stdout
    last = found.stdout.splitlines()[-1]
    assert last.startswith("ppo steps 5 to 5 are equal bit for bit: ")
    assert last.endswith(" of them tensors of weights")
    assert list(disturbed.parent.iterdir()) == [disturbed], "the temporary folder is removed"


@pytest.mark.slow
def test_a_changed_weight_is_found_at_its_step_and_tensor(disturbed: Path) -> None:
    found = python("-m", "rlhf.replay", disturbed, "--step", 4, PYTHONPATH=ROOT)
    assert found.returncode == replay.DIFFERS, found.stdout + found.stderr
    first, tensor = found.stdout.splitlines()[-2:]
    assert first == "ppo steps 3 to 4: step 3 is the first that differs; differing values: 1"
    assert tensor.startswith(f"  {TENSOR}: ")


@pytest.mark.slow
def test_replay_begins_at_the_checkpoint_before_the_step(disturbed: Path) -> None:
    assert plan_replay(disturbed, None, None) == Replay(Phase.ppo, 4, 5)
    assert plan_replay(disturbed, Phase.sft, 1) == Replay(Phase.sft, 0, 1)
    with pytest.raises(ConfigError, match=r"--step 6: ppo has the steps 1 to 5"):
        plan_replay(disturbed, Phase.ppo, 6)
    with pytest.raises(ConfigError, match=r"--phase dpo: .* has logged steps of sft, reward, ppo"):
        plan_replay(disturbed, Phase.dpo, 1)


def test_a_metric_that_the_replay_lacks_is_a_difference(tmp_path: Path) -> None:
    step = {"phase": "ppo", "step": 1}
    for name, values in {"run": {"ppo/loss": 1.0, "ppo/eval_kl": 2.0}, "replay": {}}.items():
        (tmp_path / name).mkdir()
        line = json.dumps(step | values | {"time/step_seconds": 3.0})
        (tmp_path / name / "metrics.jsonl").write_text(line + "\n")
    found = compare_logs(tmp_path / "run", tmp_path / "replay", Replay(Phase.ppo, 0, 1))
    assert (found.step, found.differing) == (1, {"ppo/loss": (1.0, None)})


def test_a_replay_that_asks_again_is_not_compared(tmp_path: Path) -> None:
    for name in ("run", "replay"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
        (tmp_path / name / "verdicts.jsonl").write_text(name)
    with pytest.raises(CheckpointError, match=r"run/verdicts\.jsonl lacks verdicts that the steps"):
        compare_logs(tmp_path / "run", tmp_path / "replay", Replay(Phase.ppo, 0, 1))


def stored_run(tiny_run: Path, folder: Path, logs: object) -> Path:
    """Copy a run, with a checkpoint of PPO's first step that has this list of logs."""
    run = copy_run(tiny_run, folder / "run")
    streams = {"actor": [("weight", 0, torch.ones(1))]}
    write_checkpoint(run / "ppo", 1, streams, {"logs": logs}, wanted_bytes=0)
    return run


FROM_START, FROM_CHECKPOINT = Replay(Phase.ppo, 0, 1), Replay(Phase.ppo, 1, 2)


@pytest.mark.parametrize("name", ["../outside", "ABSOLUTE", "tokenizer/../../outside"])
def test_a_replay_writes_no_file_that_a_checkpoint_names(
    name: str, tiny_run: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    name = name.replace("ABSOLUTE", str(outside))
    run = stored_run(tiny_run, tmp_path, {name: 2, "metrics.jsonl": 9})
    target = tmp_path / "replay"
    target.mkdir()
    replay.copy_run_at_start_step(run, FROM_CHECKPOINT, target)
    assert outside.read_text() == "mine"
    assert (target / "metrics.jsonl").stat().st_size == 9


@pytest.mark.parametrize("size", ["9", None, 10**70, [1]])
def test_a_checkpoint_whose_sizes_are_no_numbers_is_refused(
    size: object, tiny_run: Path, tmp_path: Path
) -> None:
    run = stored_run(tiny_run, tmp_path, {"metrics.jsonl": size})
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        replay.copy_run_at_start_step(run, FROM_CHECKPOINT, tmp_path)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to(__file__)  # not /dev/zero: with the fault, a copy would fill the drive


@pytest.mark.parametrize("make", [link, pipe])
@pytest.mark.parametrize("place", ["tokenizer/added", "sft/model/added", "config.yaml"])
def test_a_replay_copies_regular_files_only(
    make: Callable[[Path], None], place: str, tiny_run: Path, tmp_path: Path
) -> None:
    run, target = copy_run(tiny_run, tmp_path / "run"), tmp_path / "replay"
    target.mkdir()
    (run / place).unlink(missing_ok=True)
    make(run / place)
    with pytest.raises(CheckpointError, match=place.rpartition("/")[2]):
        replay.copy_run_at_start_step(run, FROM_START, target)
