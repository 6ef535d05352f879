"""Entry point of the process that runs one part of a check; arguments: NAME FOLDER SIZE."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import torch

from rlhf.gpu_check.rows import CheckSetting, Size, write_rows
from rlhf.jobs.sweep_jobs import end_with_parent

ROWS = "rows.jsonl"
LEAST_FREE = 8 << 30  # bytes of free GPU memory that models of full size need


def main(name: str, folder: Path, size: Size) -> None:
    """Measure all tasks of the part ``name``, with tiny models on a full GPU; write their rows."""
    end_with_parent()
    if size is Size.full and torch.cuda.mem_get_info()[0] < LEAST_FREE:
        size = Size.tiny
    module = import_module(f"rlhf.gpu_check.parts.{name}")
    write_rows(folder / ROWS, module.tasks(CheckSetting(folder=folder, size=size)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Size(sys.argv[3]))
