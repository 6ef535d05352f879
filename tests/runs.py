"""Short runs of the whole program, as users start them and inside the test's own process."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.cpu import cache_folder
from rlhf.gpu_check.runs import metrics_without_times
from tests.fork_server import ON_GPU, WarmPopen

ROOT = Path(__file__).parents[1]

# All three phases in a second: two updates each, of a model that learns nothing. Without a plan,
# which would take a sixth of it.
TINY_RUN = [
    "experiment=smoke",
    "plan=off",
    "hardware.dtype=fp32",
    "model.vocab_size=400",
    "data.size=600",
    "sft.batch_size=8",
    "sft.epochs=0.1",
    "sft.eval_examples=8",
    "reward.batch_size=8",
    "reward.epochs=0.1",
    "reward.eval_examples=8",
    "ppo.steps=2",
    "ppo.eval_prompts=8",
    "rollout.max_response_tokens=8",
]

# With these an environment takes the place of the reward model.
EPISODES = [
    "phase=pipeline_rule",
    "model@reward_model=gold",
    "data=environment",
    "environment=number_guessing",
    "+rewards.environment={kind: environment}",
    "rollout.max_response_tokens=5",
]
EVALUATED_EPISODES = [*EPISODES, "ppo.eval_every=1", "ppo.eval_prompts=8", "sft.eval_examples=8"]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


# Words that tests share, which no phase of a command may read: launch.py would refuse them.
UNREAD = {
    "phase=sft": ("reward.", "ppo.", "rollout.", "dpo."),
    "phase=reward": ("sft.", "ppo.", "rollout.", "dpo."),
    "phase=ppo": ("sft.", "reward.batch_size", "reward.epochs", "reward.eval_examples"),
    "phase=dpo": ("sft.", "reward.", "ppo."),
    "phase=pipeline": ("dpo.",),
    "phase=pipeline_dpo": ("reward.", "ppo."),
    "phase=pipeline_rule": ("reward.", "dpo."),
    "phase.order=[sft,ppo]": ("reward.", "dpo."),
    "phase.order=[sft,reward]": ("ppo.", "rollout.", "dpo."),
}
# What the run of from_run has determined.
DETERMINED = ("seed", "model", "reward.", "reward_model", "sft.", "data", "environment")


def words_that_are_read(words: Iterable[object]) -> list[str]:
    """Return the words of a command without shared words that its phases do not read."""
    texts = [str(word) for word in words]
    names_phases = any(text.startswith(("phase", "resume=", "from_run=")) for text in texts)
    phases = texts if names_phases else ["phase=pipeline"]  # the default
    unread = tuple(key for text in phases for key in UNREAD.get(text, ()))
    unread += DETERMINED if any(text.startswith("from_run=") for text in texts) else ()
    return [text for text in texts if not text.startswith(unread)]


def start(
    *words: object,
    cwd: Path,
    stdin: int | None = None,
    popen: type[subprocess.Popen[str]] = WarmPopen,
    **environment: object,
) -> subprocess.Popen[str]:
    """Start ``python words`` with more environment variables.

    By default the process has its imports done, see fork_server.py. With ``popen=subprocess.Popen``
    it is a new interpreter, as the user's is, and so is all that it starts.
    """
    return popen(
        [sys.executable, *words_that_are_read(words)],
        cwd=cwd,
        env=os.environ | {name: str(value) for name, value in environment.items()},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def python(
    *words: object, cwd: Path = ROOT, timeout: float = 300, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``python words`` to its end; ``start`` says how."""
    with start(*words, cwd=cwd, **how) as process:
        try:
            said, complaint = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, said, complaint)


def launch(*arguments: str, cwd: Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python launch.py`` to its end; ``python`` says how."""
    return python(ROOT / "launch.py", *arguments, cwd=cwd, **how)


def launch_on_gpu(
    *arguments: str, cwd: Path, machine: str = "a100", **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``python launch.py`` to its end on a pretended machine; ``python`` says how."""
    words = ["-m", "tests.pretend_cuda", "--machine", machine, ROOT / "launch.py", *arguments]
    return python(*words, cwd=cwd, **{"PYTHONPATH": ROOT} | ON_GPU | how)


def finished(run_dir: Path, *overrides: str, **how: Any) -> Path:
    """Run a tiny pipeline into ``run_dir``, which must succeed; ``python`` says how."""
    is_given = "model=pretrained" in overrides  # its tokenizer is given, so no size is read
    tiny = [word for word in TINY_RUN if not (is_given and word.startswith("model.vocab_size"))]
    run = launch(*tiny, *overrides, f"run_dir={run_dir}", cwd=run_dir.parent, **how)
    assert run.returncode == 0, run.stderr
    return run_dir


def wait_for(happened: Callable[[], object], seconds: float = 60) -> None:
    """Wait until something has happened."""
    patience = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < patience
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def flip(path: Path, share: float = 0.5) -> None:
    """Flip a bit of a file, at this share of its length."""
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)


def soaked(cases: Iterable[str], *names: str) -> list[Any]:
    """Return the cases as parameters of a test; those of ``names`` are left to ``make soak``."""
    return [pytest.param(c, marks=pytest.mark.soak) if c in names else c for c in cases]


KEEP_ALL = ["checkpoint.keep=9", "checkpoint.keep_finished=true"]


def unfinished_copy(whole: Path, run_dir: Path, phase: str, *, after_step: int) -> None:
    """Copy a run that finished with ``KEEP_ALL``, as if it had been killed late in ``phase``.

    Its last checkpoint is that of ``after_step``; what it logged later is still there.
    """
    shutil.copytree(whole, run_dir)
    for path in (run_dir, run_dir / phase):
        (path / "result.json").unlink()
    for state in (run_dir / phase / "state").glob("step-*"):
        if int(state.name[5:]) > after_step:
            shutil.rmtree(state)


def session_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all workers of this session share."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def new_cache(folder: Path) -> Path:
    """Make a cache without tokens and phases, but with what is measured and compiled just once."""
    folder.mkdir()
    for path in cache_folder().iterdir():
        if path.is_file():
            with suppress(FileNotFoundError):  # another worker has just given it its name
                shutil.copy(path, folder)
    return folder


metrics = metrics_without_times  # a run's lines, without what differs between two equal runs


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
