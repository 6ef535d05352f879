"""The command for each way of starting ranks, word for word, and what it is made from."""

import re
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlhf.base.errors import ConfigError
from rlhf.base.user_paths import relative_to_cwd
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.run import LauncherConfig
from rlhf.runtime.launch_mode import (
    LaunchMode,
    Program,
    find_slurm_task,
    first_host,
    launch_commands,
    launch_mode,
    rendezvous_address,
)
from tests.conftest import Compose
from tests.runs import ROOT, launch

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).with_name("golden")

FITTING = ["sft.batch_size=64", "reward.batch_size=64"]
GPUS = ["hardware=64xa100_80g", *FITTING]
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "8",
    "SLURM_JOB_NODELIST": "gpu[07-11,13],big[1-2]",
}
WAYS: dict[str, tuple[list[str], dict[str, str]]] = {
    "hostfile": ([*GPUS, "launcher.hostfile=hosts"], {}),
    "slurm": (GPUS, SLURM),
    "slurm_address": ([*GPUS, "launcher.master_addr=ib7", "launcher.master_port=3000"], SLURM),
    "by_hand": ([*GPUS, "launcher.master_addr=10.0.0.1"], {}),
}


@pytest.fixture(autouse=True)
def _hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("# eight\n" + "".join(f"node{i} slots=8\n" for i in range(8)))


@pytest.mark.parametrize("name", WAYS)
def test_command_is_the_golden_one(name: str, compose: Compose) -> None:
    overrides, environment = WAYS[name]
    program = Program("python", "launch.py", [*overrides, "name=it's"])
    commands = launch_commands(to_run_config(compose(overrides)), program, environment)
    text = "".join(f"{shlex.join(command)}\n" for command in commands)
    assert text == (GOLDEN / f"{name}.txt").read_text()


def test_options_of_slurm_are_those_of_the_plugin() -> None:
    plugin = pytest.importorskip("hydra_plugins.hydra_submitit_launcher.config")
    preset = OmegaConf.load(ROOT / "conf/hydra/launcher/slurm.yaml").launcher
    assert preset.keys() <= {field.name for field in fields(plugin.SlurmQueueConf)}


def test_dry_run_starts_nothing(tmp_path: Path) -> None:
    overrides = ["hardware.ranks_per_node=2", "name='a b'", "launcher.dry_run=1"]
    run = launch(*overrides, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 "
        f"{ROOT}/launch.py hardware.ranks_per_node=2 'name='\"'\"'a b'\"'\"''\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("node[01-03,7],x", "node01"),
        ("n[099-101]-ib", "n099-ib"),
        ("r[1-2]n[3,5]", "r1n3"),
    ],
)
def test_node_lists_are_read(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_jobs_that_share_a_node_meet_at_different_ports(compose: Compose) -> None:
    launcher = to_run_config(compose(GPUS)).launcher

    def port(job: int, task: int, launcher: LauncherConfig = launcher) -> int:
        environment = SLURM | {"SLURM_JOB_ID": str(job), "SLURM_PROCID": str(task)}
        return rendezvous_address(launcher, environment)[1]

    assert port(481234, 0) == port(481234, 7)
    assert len({port(job, 0) for job in range(481234, 481234 + 1000)}) == 1000
    assert all(20_000 <= port(job, 0) < 29_000 for job in (1, 8_999, 9_000, 2**31))
    assert port(481234, 0, replace(launcher, master_port=3000)) == 3000
    files = to_run_config(compose([*GPUS, "launcher.hostfile=hosts"]))
    (words,) = launch_commands(files, Program("python", "x.py", []), {"SLURM_JOB_ID": "9007"})
    assert "--master_port=20007" in words


def test_a_process_outside_of_slurm_is_no_task() -> None:
    assert find_slurm_task({}) is None
    assert find_slurm_task({"SLURM_JOB_NODELIST": "a"}) is None, "a shell that salloc opened"


def test_one_node_is_started_alone_inside_a_slurm_job(compose: Compose) -> None:
    alone = SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}
    config = to_run_config(compose(["hardware.ranks_per_node=2"]))
    assert launch_mode(config, alone) is LaunchMode.node


@pytest.mark.parametrize(
    ("overrides", "environment", "message"),
    [
        (
            ["hardware.nodes=2"],
            {},
            "hardware.nodes=2: no option names the nodes; use launcher.hostfile=FILE",
        ),
        (
            ["hardware.nodes=2"],
            SLURM,
            "SLURM_NTASKS=8 on SLURM_NNODES=8 with hardware.nodes=2: a run has one task on each",
        ),
        (["hardware.nodes=8"], SLURM | {"SLURM_NNODES": "1"}, "SLURM_NTASKS=8 on SLURM_NNODES=1"),
        ([], SLURM, "SLURM_NTASKS=8 on SLURM_NNODES=8 with hardware.nodes=1"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(
    overrides: list[str], environment: dict[str, str], message: str, compose: Compose
) -> None:
    config = to_run_config(compose(overrides))
    with pytest.raises(ConfigError, match=re.escape(message)):
        launch_mode(config, environment)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "launcher.hostfile=hosts cannot be read (No such file or directory)"),
        ("a slots=1\nb\n", "hosts:2: b: must be `name slots=N`"),
        ("a slots=1\n\nb slots=2\n", "hosts:3: b has slots=2, and hardware.ranks_per_node=1"),
        ("a slots=1\na slots=1\n", "hosts:2: a is listed twice"),
        ("a slots=1\n#b slots=1\n", "launcher.hostfile=hosts names 1 nodes, and hardware.nodes=2"),
    ],
)
def test_a_wrong_hostfile_is_refused(text: str | None, message: str, compose: Compose) -> None:
    Path("hosts").unlink()
    if text is not None:
        Path("hosts").write_text(text)
    config = to_run_config(compose(["hardware.nodes=2", "launcher.hostfile=hosts"]))
    with pytest.raises(ConfigError, match=re.escape(message)):
        launch_mode(config, {})


def test_variables_that_other_nodes_would_miss_are_refused(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "nobody")
    config = to_run_config(compose(WAYS["hostfile"][0]))
    here = {"RLHF_CACHE": "/fast", "HF_HOME": "/hub", "HF_TOKEN": "hf_secret", "NCCL_DEBUG": "INFO"}

    def start() -> list[list[str]]:
        return launch_commands(config, Program("python", "launch.py", []), here)

    with pytest.raises(ConfigError, match=r"write RLHF_CACHE=/fast and HF_HOME=/hub to \.deepsp"):
        start()
    Path(".deepspeed_env").write_text("RLHF_CACHE=/fast\nHF_HOME = /hub\n")
    with pytest.raises(
        ConfigError, match=r"^HF_TOKEN .*`hf auth login` .*`env -u HF_TOKEN"
    ) as told:
        start()
    assert "hf_secret" not in str(told.value)
    del here["HF_TOKEN"]
    here["DS_ENV_FILE"] = "others"  # DeepSpeed then reads a file of this name
    with pytest.raises(ConfigError, match="write RLHF_CACHE=/fast"):
        start()
    Path(".deepspeed_env").rename("others")
    assert len(start()) == 1
    by_hand = to_run_config(compose(WAYS["by_hand"][0]))
    assert launch_commands(by_hand, Program("python", "x.py", []), {"HF_TOKEN": "hf_secret"})


def test_the_script_is_named_from_here(tmp_path: Path) -> None:
    assert relative_to_cwd(tmp_path / "launch.py") == Path("launch.py")
    assert relative_to_cwd(Path("/elsewhere/launch.py")) == Path("/elsewhere/launch.py")
