"""One of two ranks that load and save a model by DeepSpeed: seconds, and peaks of memory.

Not a command: ``loading.py`` starts the ranks.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from shapes import SHAPES, Work, run_config

RANKS = 2
SHARD_BYTES = 20 * 10**6  # of a saved file
# Freed memory goes back at once, so that what a process has is what is in use.
RETURNED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
INTERVAL = 0.001  # seconds between two looks at the memory
Made = TypeVar("Made")


def make_half(folder: Path, shape: str) -> None:
    """A policy with random weights in bf16, as most are published, and its tokenizer."""
    import torch

    from rlhf.models.build import build_actor
    from rlhf.models.sources import ModelSource
    from rlhf.models.tokenizers import train_tokenizer

    tokenizer = train_tokenizer(["a benchmark"], vocab_size=300)
    source = ModelSource(key="k", path=None, architecture=SHAPES[shape].policy.architecture())
    model = build_actor(source, tokenizer, seed=1).to(torch.bfloat16)
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")


def private_bytes() -> int:
    """Memory that is this process's own: pages of files, which the kernel may drop, are not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def peak_of(action: Callable[[], Made]) -> tuple[Made, dict[str, float]]:
    """What ``action`` gives, its seconds, and by how many bytes memory rose at its peak."""
    gc.collect()
    before, seen, done = private_bytes(), [0], threading.Event()

    def look() -> None:
        while not done.wait(INTERVAL):
            seen[0] = max(seen[0], private_bytes() - before)

    watcher = threading.Thread(target=look)
    watcher.start()
    started = time.perf_counter()
    try:
        made = action()
    finally:
        seconds = time.perf_counter() - started
        done.set()
        watcher.join()
    return made, {"seconds": seconds, "peak": max(seen[0], private_bytes() - before)}


def measured(task: dict[str, Any], ranks: Any, shape: str) -> dict[str, Any]:
    """Loading a frozen model, its engine included, and saving it; bytes of it and of the shard."""
    from rlhf.config.batches import BatchPlan
    from rlhf.config.choices import Dtype
    from rlhf.config.roles import Role
    from rlhf.engine.select import build_engine
    from rlhf.engine.settings import EngineSettings
    from rlhf.engine.zero3_partition import build_parameter_placer
    from rlhf.models.build import build_actor
    from rlhf.models.language_model import LanguageModel
    from rlhf.models.sources import ModelSource
    from rlhf.models.tokenizers import load_tokenizer
    from rlhf.phases.shared.exporting import build_export

    folder = Path(task["folder"])
    is_stored = task["source"] == "stored" and shape == task["shape"]
    source = ModelSource(
        key="model",
        path=str(folder / "policy") if is_stored else None,
        architecture=None if is_stored else SHAPES[shape].policy.architecture(),
    )
    tokenizer = load_tokenizer(folder / "policy", key="model")
    config = run_config(folder, Work(), [f"zero={task['zero']}"])
    shared: Any = {
        "settings": EngineSettings(zero=config.zero, dtype=Dtype(task["dtype"])),
        "plan": BatchPlan(per_rank=1, micro=1, accumulation=1),
        "ranks": ranks,
    }

    def load() -> Any:
        shard = build_parameter_placer(Role.reference, **shared)
        model = build_actor(source, tokenizer, seed=1, shard=shard)
        return build_engine(LanguageModel(model), role=Role.reference, **shared)

    engine, loading = peak_of(load)
    parameters = list(engine.module.parameters())
    export = build_export(config, engine)
    with tempfile.TemporaryDirectory() as place:
        written = Path(place) if ranks.is_main else None
        _, saving = peak_of(lambda: export.write(written, shard_bytes=SHARD_BYTES))
    engine.close()
    return {
        "loading": loading,
        "saving": saving,
        "whole": sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in parameters),
        "shard": sum(getattr(p, "ds_tensor", p).nbytes for p in parameters),
    }


def main(task: dict[str, Any]) -> None:
    """Measure this rank, once a small model has brought in what is imported."""
    import torch

    from rlhf.config.choices import Device
    from rlhf.engine.devices import current_ranks

    torch.distributed.init_process_group("gloo")
    ranks = current_ranks(Device.cpu)
    measured(task, ranks, "micro")
    found = measured(task, ranks, task["shape"])
    Path(task["found"], f"{ranks.rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def run_ranks(task: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank has measured.

    Raises:
        RuntimeError: they failed; their last words are in the message.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    with tempfile.TemporaryDirectory() as found:
        done = subprocess.run(
            [sys.executable, *torchrun, __file__, json.dumps(task | {"found": found})],
            env={"OMP_NUM_THREADS": "1", **os.environ, **RETURNED_MEMORY},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{Path(__file__).name} {task} failed:\n{done.stderr[-3000:]}")
        files = [Path(found, f"{rank}.json") for rank in range(RANKS)]
        return [json.loads(file.read_text()) for file in files]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
