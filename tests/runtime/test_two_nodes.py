"""Two nodes for real: two network namespaces of this machine, joined by a virtual link."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.runs import ROOT, TINY_RUN, children, finished, launch, metrics, start, wait_for

pytestmark = pytest.mark.slow

ZERO3 = ["zero=stage3", "+zero.extra.zero_optimization.stage3_param_persistence_threshold=0"]
# Plans may differ in their micro-batches, and so in the rounding.
SAME = [*ZERO3, "plan=off", "phase=ppo", "ppo.steps=1", "ppo.warmup_steps=0", "ppo.ppo_epochs=1"]
SAME += ["ppo.eval_prompts=4", "ppo.rollout_batch_size=8", "ppo.sample_every=9"]
ENDS_WITHIN_S = 30
IN_NAMESPACE = Path(__file__).with_name("in_namespace.py")


class Node(NamedTuple):
    """A network namespace."""

    namespace: str
    link: str
    address: str
    core: int
    """The one core that its rank computes on, as each of two ranks on one node of two does."""

    def start(self, words: list[str], cwd: Path, **more: object) -> subprocess.Popen[str]:
        """Start ``python words`` on this node, with ``more`` environment variables."""
        place = [IN_NAMESPACE, self.namespace, self.core]
        return start(*place, *words, cwd=cwd, GLOO_SOCKET_IFNAME=self.link, **more)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two nodes with a link between them; their names are this process's own."""
    number = os.getpid()
    cores = sorted(os.sched_getaffinity(0))
    pair = [
        Node(
            namespace=f"rlhf-{number}-{i}",
            link=f"rlhf{number % 100000}.{i}",
            address=f"10.{number % 250}.77.{i + 1}",
            core=cores[i % len(cores)],
        )
        for i in range(2)
    ]
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        for node in pair:
            ip("netns", "add", node.namespace)
        ip("link", "add", pair[0].link, "type", "veth", "peer", "name", pair[1].link)
        for node in pair:
            inside = ["-n", node.namespace]
            ip("link", "set", node.link, "netns", node.namespace)
            ip(*inside, "address", "add", f"{node.address}/24", "dev", node.link)
            ip(*inside, "link", "set", node.link, "up")
            ip(*inside, "link", "set", "lo", "up")
        yield pair
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        pytest.skip(f"network namespaces cannot be made here: {reason}")
    finally:
        for node in pair:
            for words in (["netns", "del", node.namespace], ["link", "del", node.link]):
                subprocess.run(["ip", *words], check=False, capture_output=True)


def started(nodes: list[Node], cwd: Path, *overrides: str) -> list[subprocess.Popen[str]]:
    """The nodes, started as docs/operations.md says: each by its line of the dry run."""
    arguments = ["hardware.nodes=2", f"launcher.master_addr={nodes[0].address}", *overrides]
    dry = launch(*TINY_RUN, *arguments, "launcher.dry_run=true", cwd=cwd)
    assert dry.returncode == 0, dry.stderr
    lines = [shlex.split(line)[1:] for line in dry.stdout.splitlines()[-2:]]
    return [node.start(line, cwd) for node, line in zip(nodes, lines, strict=True)]


def started_as_pods(nodes: list[Node], cwd: Path, *overrides: str) -> list[subprocess.Popen[str]]:
    """The nodes, started as Kubeflow Trainer does: torchrun's options are PET_* variables."""
    job = {"NNODES": 2, "NPROC_PER_NODE": 1, "MASTER_ADDR": nodes[0].address, "MASTER_PORT": 29400}
    words = ["-m", "torch.distributed.run", str(ROOT / "launch.py"), *TINY_RUN, *overrides]
    return [
        node.start(words, cwd, PET_NODE_RANK=i, **{f"PET_{name}": job[name] for name in job})
        for i, node in enumerate(nodes)
    ]


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes put here end with the test, whatever becomes of it."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        for pid in [*children(process.pid), process.pid]:
            if process.poll() is None:
                os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> Path:
    """The run of SAME, from the models of ``tiny_run``, with two ranks on one node."""
    words = [*SAME, f"from_run={tiny_run}", "hardware.ranks_per_node=2"]
    return finished(tmp_path_factory.mktemp("one") / "run", *words)


def test_two_nodes_compute_what_one_does(
    nodes: list[Node],
    tmp_path: Path,
    running: list[subprocess.Popen[str]],
    alone: Path,
    tiny_run: Path,
) -> None:
    run_dir = tmp_path / "two"
    running += started(nodes, tmp_path, *SAME, f"from_run={tiny_run}", f"run_dir={run_dir}")
    assert_one_run(running, run_dir, "ppo on 2 x cpu")
    got, expected = metrics(run_dir), metrics(alone)
    assert any("ppo/actor_loss" in line for line in expected)
    assert got == expected


def test_pods_are_one_run(
    nodes: list[Node], tmp_path: Path, running: list[subprocess.Popen[str]]
) -> None:
    run_dir = tmp_path / "pods"
    running += started_as_pods(nodes, tmp_path, "phase=sft", f"run_dir={run_dir}")
    assert_one_run(running, run_dir, "sft on 2 x cpu")
    assert metrics(run_dir)[-1]["sft/eval_perplexity"] > 0


def assert_one_run(running: list[subprocess.Popen[str]], run_dir: Path, line: str) -> None:
    ends = [(*process.communicate(timeout=300), process.returncode) for process in running]
    assert [code for *_, code in ends] == [0, 0], ends
    assert line in ends[0][0]
    assert "nodes: 2\n" in (run_dir / "config.yaml").read_text()


def cut(node: Node, process: subprocess.Popen[str]) -> None:
    """Take the link away; the node goes on, unreachable."""
    ip("-n", node.namespace, "link", "set", node.link, "down")


def kill_rank(node: Node, process: subprocess.Popen[str]) -> None:
    """End the node's rank, but not the torchrun that started it in a session of its own."""
    (rank,) = (child for child in children(process.pid) if os.getsid(child) == child)
    os.kill(rank, signal.SIGKILL)


def kill_launcher(node: Node, process: subprocess.Popen[str]) -> None:
    """End the node's torchrun, which leaves its rank alone."""
    os.kill(process.pid, signal.SIGKILL)


soaked = partial(pytest.param, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("loss", "lost", "message"),
    [
        (kill_launcher, 0, "the launcher of rank 0 on {host} was killed"),
        soaked(cut, 1, "rank 1 on {host} ({output}) ended without an error"),  # 14 s, by probes
        soaked(kill_rank, 1, "rank 1 on {host} ({output}) ended without an error"),
        soaked(kill_rank, 0, "rank 0 on {host} ended without an error"),
        soaked(kill_launcher, 1, "the launcher of rank 1 on {host} ({output}) was killed"),
    ],
)
def test_the_loss_of_one_node_ends_the_other(
    loss: object,
    lost: int,
    message: str,
    nodes: list[Node],
    tmp_path: Path,
    running: list[subprocess.Popen[str]],
) -> None:
    run_dir = tmp_path / "run"
    running += started(nodes, tmp_path, "phase=sft", "sft.epochs=9999", f"run_dir={run_dir}")
    wait_for((run_dir / "metrics.jsonl").exists, seconds=120)
    loss(nodes[lost], running[lost])  # type: ignore[operator]
    then = time.monotonic()
    _, said = running[1 - lost].communicate(timeout=2 * ENDS_WITHIN_S)
    assert time.monotonic() - then < ENDS_WITHIN_S
    assert running[1 - lost].returncode != 0
    cause = message.format(host=os.uname().nodename, output=run_dir / "logs" / "rank_1.txt")
    assert said.count(f"error: {cause}") == 1, said
    last = said.rstrip("=\n").rpartition("\n")[2]
    assert last.startswith(f"  traceback : {cause}"), "torchrun ends with it"
