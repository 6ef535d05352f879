"""Run PPO with a vLLM server that shares the GPU, if vLLM is installed."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import which

from rlhf.base.errors import RolloutError
from rlhf.gpu_check.rows import CheckSetting, Finding, Task, checked_finding, skipped_finding
from rlhf.gpu_check.runs import limit_of_run, run_to_end
from rlhf.options.vllm.vllm_client import START, VllmClient
from rlhf.phases.ppo.logprob_reuse import MISMATCH

LIMITS = "--host 127.0.0.1 --gpu-memory-utilization 0.3 --max-model-len 512"
MOST = 0.02  # nats per token, as rollout.max_logprob_mismatch


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield one task: SFT, then PPO from its model."""
    yield Task("rollout=vllm_server", partial(_check_server, setting.folder))


def _check_server(folder: Path) -> Finding:
    if which("vllm") is None:
        return skipped_finding("vLLM is not installed: there is no command vllm")
    sft = run_to_end(folder / "sft", "TINY HEAD_64 phase=sft")
    _ = sft.result  # a run that failed raises here
    model = sft.run_dir / "sft" / "model"
    words = "TINY RULE phase.order=[ppo] model=pretrained rollout=vllm_server"
    with _serve(model) as url:
        places = (f"model.path={model}", f"rollout.server.url={url}")
        ended = run_to_end(folder / "ppo", words, *places)
    _ = ended.result
    apart = max(line[MISMATCH] for line in ended.metrics if MISMATCH in line)
    return checked_finding(apart <= MOST, f"{apart:.4f} nats", f"up to {MOST}", mismatch=apart)


@contextmanager
def _serve(model: Path) -> Iterator[str]:
    """Yield the address of a server of ``model``, which ends after the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = START.replace("MODEL_FOLDER", shlex.quote(str(model)))
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + limit_of_run()
    server = subprocess.Popen(["env", *shlex.split(f"{command} {LIMITS} --port {port}")])
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
