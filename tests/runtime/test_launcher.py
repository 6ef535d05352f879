"""Starting ranks for real, in each way, and what becomes of those that are left when one ends."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from rlhf.runtime import launcher
from rlhf.runtime.rank import Failure, FailureKind, find_first_failure, report_to_agent
from tests import runs
from tests.runs import ROOT, TINY_RUN, TORCHRUN, children, free_port, metrics, wait_for

HOST = socket.gethostname()
FAILING_RANK = Path(__file__).with_name("failing_rank.py")


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start processes as ``runs.start`` does; what still runs ends with the test."""
    running: list[subprocess.Popen[str]] = []

    def started(*words: object, **environment: object) -> subprocess.Popen[str]:
        running.append(runs.start(*words, cwd=tmp_path, **environment))
        return running[-1]

    yield started
    for process in running:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_the_first_failure_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = Failure(FailureKind.refused, "first"), Failure(FailureKind.lost, "second")
    files = [str(tmp_path / str(rank)) for rank in (1, 0)]
    for file, failure in zip(files, failures, strict=True):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file)
        report_to_agent(failure)
    ends = [ProcessFailure(0, 1, 2, file) for file in (*files, str(tmp_path / "killed"))]
    assert find_first_failure(reversed(ends)) == failures[0]
    assert find_first_failure(ends[2:]) is None


@pytest.mark.parametrize(
    ("exit_codes", "stopped"),
    [
        ([130, 130], True),
        ([-signal.SIGTERM, 130], True),
        ([-signal.SIGTERM, -signal.SIGTERM], False),
        ([130, -signal.SIGKILL], False),
        ([130, 1], False),
    ],
)
def test_ranks_stop_together_or_are_ended(exit_codes: list[int], stopped: bool) -> None:
    assert launcher.have_stopped(exit_codes) is stopped


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process_and_no_file(start: Start, tmp_path: Path) -> None:
    process, temporary = start_two_ranks(start, tmp_path / "run")
    ranks = children(process.pid)
    process.kill()
    process.communicate(timeout=30)  # also until no rank can write to its terminal
    assert len(ranks) >= 2
    wait_for(lambda: not any(Path(f"/proc/{pid}/fd/0").exists() for pid in ranks), seconds=10)
    assert not list(temporary.iterdir())


def start_two_ranks(start: Start, run_dir: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start an endless run; return it, as soon as it has taken a step, and its temporary folder."""
    temporary = run_dir.with_name("temporary")
    temporary.mkdir()
    more = ["phase=sft", "sft.epochs=9999", "hardware.ranks_per_node=2", f"run_dir={run_dir}"]
    process = start(ROOT / "launch.py", *TINY_RUN, *more, TMPDIR=temporary)
    wait_for((run_dir / "metrics.jsonl").exists, seconds=120)
    assert list(temporary.iterdir()), "or nothing could be left"
    return process, temporary


@pytest.mark.slow
def test_a_killed_rank_ends_the_run(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process, temporary = start_two_ranks(start, run_dir)
    os.kill(children(process.pid)[-1], signal.SIGKILL)  # the last one that was started
    said, complaint = process.communicate(timeout=30)
    assert not list(temporary.iterdir())
    assert process.returncode == 1, "which AGENTS.md promises: the same command may work"
    ranks = f"torch.distributed.run --standalone --nproc-per-node=2 {ROOT}/launch.py"
    assert f"{ranks} resume={run_dir} trust_run=true" in said, "the command was trusted, or asked"
    (line,) = [each for each in complaint.splitlines() if each.startswith("error: ")]
    output = run_dir / "logs" / "rank_1.txt"
    assert line == (
        f"error: rank 1 on {HOST} ({output}) was ended by SIGKILL; "
        f"rlhf resume={run_dir} continues the run"
    )
    assert complaint.endswith(f"{line}\n")
    assert output.exists()


@pytest.mark.slow
def test_the_failing_rank_speaks_first(tmp_path: Path) -> None:
    run = runs.python(*TORCHRUN, FAILING_RANK, tmp_path, timeout=120)
    assert run.returncode != 0
    output = tmp_path / "logs" / "rank_1.txt"
    message = f"rank 1 on {HOST} ({output}) failed: ValueError: this rank is broken"
    assert run.stderr.count(f"error: {message}\n") == 1
    assert "Connection closed by peer" not in run.stderr, "rank 0's collective is no news"
    assert "passed" not in run.stdout
    printed = output.read_text()
    assert printed.startswith("printed by rank 1\nwritten by a library of rank 1\nTraceback")
    assert printed.endswith("ValueError: this rank is broken\n")
    assert run.stderr.rstrip("=\n").endswith(f"  traceback : {message}"), "torchrun ends with it"


def slurm_tasks(start: Start, *overrides: str) -> list[subprocess.Popen[str]]:
    """Two tasks of a SLURM job, which has this machine as its nodes."""
    command = [ROOT / "launch.py", *TINY_RUN, "hardware.nodes=2", *overrides]
    port = free_port()
    return [
        start(
            *command,
            f"launcher.master_port={port}",
            SLURM_PROCID=number,
            SLURM_NTASKS=2,
            SLURM_NNODES=2,
            SLURM_JOB_NODELIST="localhost",
        )
        for number in (0, 1)
    ]


@pytest.mark.slow
def test_the_tasks_of_a_slurm_job_are_one_run(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    tasks = slurm_tasks(start, "phase=sft", f"run_dir={run_dir}")
    ends = [(*task.communicate(timeout=240), task.returncode) for task in tasks]
    assert [code for *_, code in ends] == [0, 0], ends
    assert ends[0][0].count("sft on 2 x cpu") == 1
    assert "--nnodes=2 --node-rank=0 --nproc-per-node=1 --master-addr=localhost" in ends[0][0]
    assert not re.search("starting|sft|error", ends[1][0] + ends[1][1]), "told once"
    assert metrics(run_dir)[-1]["sft/eval_perplexity"] > 0


@pytest.mark.slow
def test_every_slurm_task_tells_what_ended_its_ranks(start: Start) -> None:
    tasks = slurm_tasks(start, "sft.batch_size=512", "plan=check")
    complaints = [task.communicate(timeout=240)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [2, 2]
    for complaint in complaints:
        assert complaint.count("error: ") == 1
        assert "sft.batch_size=512" in complaint
        assert "Traceback" not in complaint


# What the DeepSpeed launcher calls to reach other machines; here all of them are this one, and the
# test starts their processes: it has the imports done.
SSH = "#!/bin/sh\nexit 0\n"
PDSH = f"""#!{sys.executable}
import json, os, signal, sys
signal.alarm(180)  # if the test is killed, nobody opens the other end
place = os.path.dirname(__file__)
with open(os.path.join(place, "asked"), "w") as asked:
    json.dump(sys.argv[5:], asked)
with open(os.path.join(place, "ends")) as ends:
    said, codes = zip(*json.load(ends))
print(*said, sep="", flush=True)
sys.exit(max(codes, key=abs))
"""


def run_on_hosts(start: Start, place: Path) -> None:
    """Start on each host what pdsh is asked for, and tell pdsh what it said and how it ended."""
    hosts, *words = json.loads((place / "asked").read_text())
    jobs = []
    for number in range(len(hosts.split(","))):
        parts = " ".join(words).replace("%n", str(number)).split(";")
        *settings, (_, folder), (program, *command) = map(shlex.split, parts)
        assert (folder, program) == (str(place), sys.executable)
        jobs.append(start(*command, **dict(word.split("=", 1) for _, word in settings)))
    ends = [("".join(job.communicate()), job.returncode) for job in jobs]
    (place / "ends").write_text(json.dumps(ends))


@pytest.mark.slow
def test_the_nodes_of_a_hostfile_are_one_run(start: Start, tmp_path: Path) -> None:
    for name, text in {"ssh": SSH, "pdsh": PDSH}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("asked", "ends"):
        os.mkfifo(tmp_path / name)  # each is opened as soon as the other end is
    Thread(target=run_on_hosts, args=[start, tmp_path], daemon=True).start()
    (tmp_path / "hosts").write_text("first slots=1\nsecond slots=1\n")
    settings = (f"{name}={os.environ[name]}" for name in ("RLHF_CACHE", "HF_HUB_OFFLINE"))
    (tmp_path / ".deepspeed_env").write_text("\n".join(settings))
    run_dir = tmp_path / "run"
    nodes = ["hardware.nodes=2", "launcher.hostfile=hosts", "launcher.master_addr=localhost"]
    place = [f"launcher.master_port={free_port()}", f"run_dir={run_dir}", "name='a b'"]
    command = [ROOT / "launch.py", *TINY_RUN, "phase=sft", *nodes, *place]
    process = start(*command, PATH=f"{tmp_path}:{os.environ['PATH']}")
    said, complaint = process.communicate(timeout=180)
    assert process.returncode == 0, said + complaint
    assert f"--hostfile={tmp_path}/hosts --master_addr=localhost" in said
    assert said.count("sft on 2 x cpu") == 1, "one run, told once"
    assert metrics(run_dir)[-1]["sft/eval_perplexity"] > 0


@pytest.mark.slow
def test_a_job_that_was_preempted_goes_on_with_its_run(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    arguments = ["-m", "hydra/launcher=submitit_local", *TINY_RUN, "ppo.steps=12"]
    arguments += ["phase.order=[sft,ppo]", "model@reward_model=gold", "sft.eval_examples=8"]
    arguments += ["ppo.ppo_epochs=1", "ppo.rollout_batch_size=8", "ppo.eval_prompts=4"]
    arguments += ["ppo.sample_every=99"]
    job = tmp_path / "sweep" / "0"
    sweep = f"hydra.sweep.dir={job.parent}"
    process = start(ROOT / "launch.py", *arguments, sweep)
    # In a step: a signal that arrives while a phase is taken down can be lost in a __del__.
    lines, first = job / "metrics.jsonl", '"phase": "ppo", "step": 1'
    wait_for(lambda: lines.exists() and first in lines.read_text(), seconds=120)
    controller = children(process.pid)[-1]
    task = children(controller)[-1]
    os.kill(task, signal.SIGUSR2)  # as SLURM does some time before it takes the nodes away
    _, complaint = process.communicate(timeout=180)
    assert process.returncode == 0, complaint
    (log,) = job.parent.glob(".submitit/*/*_log.out")
    assert log.read_text().count("sft, ppo on 1 x cpu") == 2
    assert log.read_text().count("sft: 420 examples to train on") == 1, "what was done stays"
    assert (job / "result.json").exists()


def test_a_slurm_job_does_not_wait_for_a_checkpoint_of_ranks_that_are_left_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert launcher.shutdown_seconds(25) == 30
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert launcher.shutdown_seconds(25) == 5
