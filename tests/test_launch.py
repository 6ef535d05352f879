"""launch.py as users start it; runs themselves are tested with the runtime."""

import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import launch as app
from rlhf.base.errors import DataError
from tests import runs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def launch(
    command: str, cwd: Path, *, python: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run launch.py with the arguments in ``command``."""
    return runs.python(*python, ROOT / "launch.py", *shlex.split(command), cwd=cwd, **(env or {}))


def test_help_imports_no_torch(tmp_path: Path) -> None:
    run = launch("--help", tmp_path, python=("-X", "importtime"))
    imported = re.findall(r"\| +([\w.]+)$", run.stderr, flags=re.MULTILINE)
    assert run.returncode == 0
    assert "rlhf.config.freeze" in imported
    assert not [name for name in imported if name.split(".")[0] in {"torch", "transformers"}]
    assert "rlhf -m ppo.kl_ctl=0.02,0.05,0.1 seed=1,2" in run.stdout
    assert '"$(rlhf -sc install=bash)"' in run.stdout


def test_cfg_shows_the_composed_config(tmp_path: Path) -> None:
    run = launch("--cfg job --resolve ppo.steps=7 zero=stage2 --local_rank=0", tmp_path)
    shown = OmegaConf.create(run.stdout)
    assert (run.returncode, run.stderr) == (0, "")
    assert (shown.ppo.steps, shown.zero.stage) == (7, 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("-m ppo.cliprang=0.1,0.2", "unknown key ppo.cliprang; did you mean ppo.cliprange?"),
        ("-m --cfg job", "--multirun (-m), --run, --cfg, --info and --shell-completion cannot"),
        ("run_dir=file/run", "the run directory file/run cannot be created (Not a directory)"),
        ("resume=nowhere seed=2", "nowhere is not the directory of a run: there is no such folder"),
        (
            "zero.extra={zero_optimization:{stage:9}}",
            "zero.extra.zero_optimization.stage=9: zero.stage sets this entry; use zero.stage",
        ),
    ],
)
def test_mistake_ends_with_one_line(command: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = launch(command, tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_mistake_in_one_job_of_a_sweep(tmp_path: Path) -> None:
    run = launch("-m seed=-1,-2", tmp_path)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1] == "error: seed=-1: must be 0 or more"
    assert "['seed=-1']" in run.stderr


def test_resume_may_be_started_in_another_way(tmp_path: Path) -> None:
    config = launch("--cfg job --resolve hardware.ranks_per_node=2", tmp_path).stdout
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "hosts").write_text("a slots=2\n")
    (tmp_path / ".deepspeed_env").write_text("HF_HUB_OFFLINE=1\nRLHF_CACHE=cache\n")
    run = launch("resume=. launcher.hostfile=hosts launcher.dry_run=true", tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "deepspeed.launcher.runner --hostfile=hosts" in run.stdout
    assert run.stdout.endswith("launch.py resume=. launcher.hostfile=hosts\n")
    assert (tmp_path / "config.yaml").read_text() == config, "a dry run changes nothing"


@pytest.mark.parametrize("word", ["launcher.dry_run=true", "plan=only"])
def test_what_started_ranks_cannot_do_is_refused(word: str, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    rank |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    run = launch(word, tmp_path, env=rank)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"error: {word}: the ranks have been started; ")


def test_a_pod_is_told_that_it_runs_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # an engine in this process has set it
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"}
    run = launch("launcher.dry_run=true seed=2", tmp_path, env=pod)
    assert run.returncode == 0
    assert run.stdout.endswith("launch.py seed=2\n")
    (line,) = run.stderr.splitlines()
    assert line.startswith("RANK=1 and WORLD_SIZE=2 without LOCAL_RANK: ")


def test_tab_completes(tmp_path: Path) -> None:
    line = "python launch.py zero=stage2"
    env = {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    run = launch("-sc query=bash", tmp_path, env=env)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["zero=stage2", "zero=stage2_offload"]


def test_a_mapping_takes_new_keys(tmp_path: Path) -> None:
    keys = "zero.extra={zero_optimization:{overlap_comm:false}} model.architecture={rope_theta:9}"
    run = launch(f"--cfg job --resolve {keys}", tmp_path)
    assert run.returncode == 0, run.stderr
    shown = OmegaConf.create(run.stdout)
    assert shown.zero.extra.zero_optimization.overlap_comm is False
    assert (shown.model.architecture.rope_theta, shown.model.architecture.hidden_size) == (9, 96)


@pytest.fixture
def _arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """What launch() changes in this process is put back."""
    monkeypatch.setattr(sys, "argv", ["launch.py", "seed=2", "--local_rank=3"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)


def raising(error: BaseException) -> Callable[[], None]:
    """A function that raises ``error``."""

    def fail() -> None:
        raise error

    return fail


@pytest.mark.usefixtures("_arguments")
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (DataError("row 3 has no prompt"), 2, "error: row 3 has no prompt\n"),
    ],
)
def test_exit_code(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(app, "main", raising(error))
    assert app.start() == code
    assert capsys.readouterr().err == message


@pytest.mark.usefixtures("_arguments")
def test_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "main", raising(ValueError("shapes differ")))
    with pytest.raises(ValueError, match="shapes differ"):
        app.start()


@pytest.mark.usefixtures("_arguments")
@pytest.mark.parametrize(("rank", "part"), [(None, "main"), ("0", "main"), ("1", "join")])
def test_only_the_first_rank_composes(
    rank: str | None, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(app, "main", lambda: called.append("main"))
    monkeypatch.setattr("rlhf.runtime.launcher.join_started_ranks", lambda: called.append("join"))
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert app.start() == 0
    assert called == [part]
    assert sys.argv == ["launch.py", "seed=2"]
