"""Let a whole process, and all Python processes that it starts, find a pretended GPU."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from tests.pretend_cuda.gpu import ROOT, Gpu

DRIVER = "/proc/driver/nvidia/version"  # by which hardware=auto finds that there is a GPU
HOOK = ROOT / "tests" / "pretend_cuda" / "children"


def pretend(library: ctypes.CDLL) -> Gpu:
    """Start a GPU for the rest of this process."""
    from tests.pretend_cuda.torch_cuda import replace

    gpu = Gpu(library)
    gpu.start()
    replace(gpu, setattr)
    return gpu


def pretend_driver() -> None:
    """Let the file of a driver exist, without which nobody asks torch for a GPU."""
    exists = Path.exists

    def exists_or_driver(path: Path, **how: Any) -> bool:
        return str(path) == DRIVER or exists(path, **how)

    Path.exists = exists_or_driver  # type: ignore[method-assign]


def for_children() -> None:
    """Let Python processes that this one starts import sitecustomize.py of the folder HOOK."""
    paths = [str(HOOK), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
