"""Being started by torchrun or by the DeepSpeed launcher."""

from pathlib import Path

import pytest

from rlhf.base.errors import ConfigError
from rlhf.config.freeze import to_run_config
from rlhf.runtime.rendezvous import (
    is_secondary_node,
    rank_from_environment,
    replace_rank_counts,
    unset_pod_variables,
)
from tests.conftest import Compose
from tests.runs import ROOT, TINY_RUN, launch, metrics, python


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, per_node: int) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank % per_node}
    variables |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": per_node}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_a_plain_process_is_no_rank(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    config = to_run_config(compose([]))
    assert rank_from_environment() is None
    assert replace_rank_counts(config) is config


def test_started_ranks_replace_those_of_the_config(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_rank(monkeypatch, rank=5, world=8, per_node=4)
    assert unset_pod_variables() is None, "they keep their variables"
    hardware = replace_rank_counts(to_run_config(compose([]))).hardware
    assert rank_from_environment() == 5
    assert (hardware.nodes, hardware.ranks_per_node) == (2, 4)


def test_batches_must_divide_over_the_started_ranks(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_rank(monkeypatch, rank=0, world=3, per_node=3)
    with pytest.raises(ConfigError, match=r"sft\.batch_size=32: must be a multiple of"):
        replace_rank_counts(to_run_config(compose([])))


def test_ranks_that_are_typed_by_hand_are_not_started(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["hardware.nodes=2", "launcher.master_addr=10.0.0.1"]
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"with torchrun on every node; launcher\.dry_run=true"):
        replace_rank_counts(to_run_config(compose(overrides)))
    be_rank(monkeypatch, rank=0, world=2, per_node=1)
    assert replace_rank_counts(to_run_config(compose(overrides))).hardware.nodes == 2


@pytest.mark.parametrize(
    ("rank", "task", "expected"),
    [(None, None, False), (None, "0", False), (None, "1", True), ("2", "1", False)],
)
def test_the_tasks_after_the_first_follow(
    rank: str | None, task: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"RANK": rank, "LOCAL_RANK": rank, "SLURM_PROCID": task}
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    for name, value in {"WORLD_SIZE": "4", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "a"}.items():
        monkeypatch.setenv(name, value)
    assert is_secondary_node() is expected


@pytest.mark.parametrize("world", ["1", "2"])
def test_the_number_of_a_pod_is_no_rank(
    world: str, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    config = to_run_config(compose([]))
    assert replace_rank_counts(config) is config
    advice = unset_pod_variables()
    monkeypatch.setenv("LOCAL_RANK", "0")  # as rlhf/engine/devices.py does
    assert rank_from_environment() is None
    line = (
        "RANK=0 and WORLD_SIZE=2 without LOCAL_RANK: torchrun did not start this process, which "
        "therefore runs by itself. Start torchrun on every pod with --nnodes=$WORLD_SIZE "
        "--node-rank=$RANK, or unset both variables (docs/operations.md)"
    )
    assert advice == (None if world == "1" else line)


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "deepspeed": ["deepspeed.launcher.runner", "--num_accelerators=2", "--master_port=29611"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_ranks_started_by_another_launcher_join_one_run(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = ["-m", *LAUNCHERS[name], ROOT / "launch.py", *TINY_RUN, "phase=sft"]
    run = python(*command, f"run_dir={run_dir}", cwd=tmp_path, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("sft on 2 x cpu") == 1, "one run, told once"
    assert "ranks_per_node: 2" in (run_dir / "config.yaml").read_text()
    assert metrics(run_dir)[-1]["sft/eval_perplexity"] > 0


REFUSED = {  # before there is a run, and in it
    "seed=-1": "seed=-1: must be 0 or more",
    "sft.batch_size=512": "sft.batch_size=512",
}


@pytest.mark.slow
@pytest.mark.parametrize("override", REFUSED)
def test_what_the_first_rank_refuses_is_told_to_all(override: str, tmp_path: Path) -> None:
    # Exit codes of the ranks are torchrun's to report; that it must end them would show as well.
    run = python(
        *("-m", *LAUNCHERS["torchrun"], ROOT / "launch.py", *TINY_RUN, "phase=sft", override),
        cwd=tmp_path,
        timeout=120,
    )
    assert run.returncode != 0
    (first, *_) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert REFUSED[override] in first


@pytest.mark.slow
def test_what_spawned_ranks_refuse_is_told_once(tmp_path: Path) -> None:
    run = launch(*TINY_RUN, "hardware.ranks_per_node=2", "sft.batch_size=512", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.count("error: ") == 1
    assert "sft.batch_size=512" in run.stderr
    assert "Traceback" not in run.stderr
