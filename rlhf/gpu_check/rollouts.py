"""Run PPO with every backend that samples responses.

Has the parts ``speed`` (seconds and tokens per second, as a run reports them), ``vllm`` and
``hybrid_engine`` of rlhf.gpu_check. ``benchmarks/rollout.py --device cuda`` compares only
generation with other libraries.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import which

from rlhf.base.errors import USER_ERROR, RolloutError
from rlhf.gpu_check.rows import CheckRow, Size, Task, checked_row, measured_row, skipped_row
from rlhf.gpu_check.runs import RUNS, SIDE_BY_SIDE, EndedRun, limit_of_run, run_to_end
from rlhf.options.vllm.vllm_client import START, VllmClient
from rlhf.phases.ppo.logprob_reuse import MISMATCH

TIMED = ("step", "generate", "score", "train")  # metrics time/NAME_seconds
SERVER_OPTIONS = "--host 127.0.0.1 --gpu-memory-utilization 0.3 --max-model-len 512"
MOST_MISMATCH = 0.02  # nats per token, as rollout.max_logprob_mismatch
HYBRID_EXPECTED = "yes if the results match, otherwise no and the reason"


def check_speed(folder: Path, size: Size) -> Iterator[Task]:
    """Yield a task for each run; the runs follow one another, so that each has the GPU alone."""
    for number, (name, words) in enumerate(RUNS["speed"][size].items(), start=1):
        yield name, partial(_time_ppo_step, folder / f"run_{number}", words)


def _time_ppo_step(run_dir: Path, words: str) -> CheckRow:
    metrics = run_to_end(run_dir, words).metrics
    last = [line for line in metrics if "time/step_seconds" in line][-1]
    seconds = {part: last[f"time/{part}_seconds"] for part in TIMED}
    speed = last["speed/tokens_per_second"]
    split = ", ".join(f"{part} {seconds[part]:.2f}" for part in TIMED[1:])
    return measured_row(
        f"{speed:,.0f} tokens/s; {seconds['step']:.2f} s per step ({split})",
        tokens_per_second=speed,
        **{f"{part}_seconds": value for part, value in seconds.items()},
    )


def check_vllm(folder: Path, _: Size) -> Iterator[Task]:
    """Yield one task (skipped without vLLM): SFT, then PPO with a server of the SFT model."""
    yield "rollout=vllm_server", partial(_check_server, folder)


def _check_server(folder: Path) -> CheckRow:
    if which("vllm") is None:
        return skipped_row("vLLM is not installed: there is no command vllm")
    sft = run_to_end(folder / "sft", "TINY HEAD_64 phase=sft")
    model = sft.finished_dir / "sft" / "model"
    words = "TINY RULE phase.order=[ppo] model=pretrained rollout=vllm_server"
    with _serve(model) as url:
        overrides = (f"model.path={model}", f"rollout.server.url={url}")
        ended = run_to_end(folder / "ppo", words, *overrides)
    worst = max(line[MISMATCH] for line in ended.metrics if MISMATCH in line)
    figure, expected = f"{worst:.4f} nats", f"up to {MOST_MISMATCH}"
    return checked_row(worst <= MOST_MISMATCH, figure, expected, mismatch=worst)


@contextmanager
def _serve(model: Path) -> Iterator[str]:
    """Start a server of ``model`` and yield its address; end the server after the block."""
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        port = free_socket.getsockname()[1]
    command = START.replace("MODEL_FOLDER", shlex.quote(str(model)))
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + limit_of_run()
    server = subprocess.Popen(["env", *shlex.split(f"{command} {SERVER_OPTIONS} --port {port}")])
    try:
        while True:
            try:
                VllmClient(url, timeout=1.0).fetch_weight_version()
                break
            except RolloutError:
                if server.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(1.0)
        yield url
    finally:
        server.terminate()
        server.wait()


def check_hybrid_engine(folder: Path, _: Size) -> Iterator[Task]:
    """Yield a task for each ZeRO stage with which DeepSpeed-Chat uses the Hybrid Engine.

    If the first run is refused, the second would be too, for the same reason.
    """
    for stage in (2, 3):
        arguments = folder / f"stage{stage}", "HYBRID_ENGINE", f"zero=stage{stage}"
        run = SIDE_BY_SIDE.submit(run_to_end, *arguments)
        yield f"stage {stage}", partial(_describe_hybrid_engine, run)
        if run.exception() is None and run.result().code == USER_ERROR:
            return


def _describe_hybrid_engine(run: Future[EndedRun]) -> CheckRow:
    ended = run.result()
    if ended.code == USER_ERROR:
        return skipped_row(f"no: {ended.last_line}", HYBRID_EXPECTED)
    steps = ended.phases["ppo"]["steps"]
    figure = f"yes: tokens and log-probs agree with the model's, {steps} PPO steps"
    return checked_row(True, figure, HYBRID_EXPECTED)
