"""Check both settings of hardware.on_oom: retry with smaller micro-batches, and a clear error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlhf.base.errors import USER_ERROR
from rlhf.config.freeze import load_frozen_config
from rlhf.config.machine_rates import GIB
from rlhf.gpu_check.rows import CheckSetting, Finding, Size, Task, checked_finding
from rlhf.gpu_check.runs import SIDE_BY_SIDE, EndedRun, planned_gib, run_to_end
from rlhf.run.tracker import Tracker

SHARE = 0.6  # share of the memory planned for SFT that torch may use
RETRIED = "continuing with smaller micro-batches"
# Batch sizes whose activations need most of the memory, so that halving a micro-batch helps.
BATCH = {Size.tiny: 64, Size.full: 1024}
SIZES = {
    Size.tiny: "data.size=400 model.architecture.hidden_size=64",
    Size.full: "data.size=8000 model.architecture.hidden_size=512",
}


class LessMemory(Tracker):
    """A tracker that imitates a small GPU: torch may use only SHARE of the memory planned for SFT.

    The limit stays the same when the run is retried, so smaller micro-batches may fit.
    """

    def __init__(self, _: Any, run_dir: Path) -> None:
        total = torch.cuda.get_device_properties(0).total_memory / GIB
        torch.cuda.set_per_process_memory_fraction(SHARE * planned_gib(run_dir, "sft") / total)


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield two tasks: the run that must be retried, and the run that must end with an error."""
    retried = SIDE_BY_SIDE.submit(_check_retry, setting)
    stopped = SIDE_BY_SIDE.submit(_check_stop_with_error, setting)
    yield Task("hardware.on_oom=reduce_micro_batch", retried.result)
    yield Task("hardware.on_oom=stop", stopped.result)


def _run_sft(setting: CheckSetting, on_oom: str) -> EndedRun:
    batch, sizes = BATCH[setting.size], SIZES[setting.size]
    sizes += f" sft.batch_size={batch} sft.micro_batch_size={batch}"
    return run_to_end(setting.folder / on_oom, f"RETRIED {sizes} hardware.on_oom={on_oom}")


def _check_retry(setting: CheckSetting) -> Finding:
    ended = _run_sft(setting, "reduce_micro_batch")
    _ = ended.result  # a run that failed raises here
    before, after = BATCH[setting.size], load_frozen_config(ended.run_dir).sft.micro_batch_size
    times = ended.output.count(RETRIED)
    return checked_finding(
        times > 0 and after is not None and after < before,
        f"retried {times} times; micro-batch {before} became {after}",
        "at least one retry, and an end",
        retries=times,
        micro_batch=after or 0,
    )


def _check_stop_with_error(setting: CheckSetting) -> Finding:
    ended = _run_sft(setting, "stop")
    begin = f"sft: out of memory with sft.micro_batch_size={BATCH[setting.size]}"
    return checked_finding(
        ended.code == USER_ERROR and ended.last_line.startswith(begin),
        f"exit code {ended.code}: {ended.last_line}",
        f"exit code {USER_ERROR}: {begin} ...",
    )
