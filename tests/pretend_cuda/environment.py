"""Environment variables that CUDA and NCCL read once: a program that sets them later is refused."""

import os
import re
from collections.abc import Callable
from typing import Any

# The driver, cuBLAS and torch's allocator read these at the first call of CUDA, and NCCL with the
# first group.
READ_ONCE = {
    "CUDA": re.compile(
        r"CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|MODULE_LOADING)|CUBLAS(LT)?_\w+|"
        r"CUDA_DEVICE_MAX_CONNECTIONS|NVIDIA_TF32_OVERRIDE|"
        r"PYTORCH_((CUDA_)?ALLOC_CONF|NO_CUDA_MEMORY_CACHING)"
    ),
    "NCCL": re.compile(r"(TORCH_)?NCCL_\w+"),
}


class Environment:
    """What this process has read of its environment, and where it did."""

    def __init__(self) -> None:
        self.allocator: str | None = None  # PYTORCH_ALLOC_CONF when CUDA started
        self._readers: dict[str, str] = {}  # CUDA or NCCL -> the line that started it

    def read(self, reader: str) -> None:
        """Read the environment as CUDA or NCCL does when it starts; do nothing the next time."""
        if reader in self._readers:
            return
        from tests.pretend_cuda.gpu import call_site

        self._readers[reader] = call_site()
        if reader == "CUDA":
            self.allocator = os.environ.get("PYTORCH_ALLOC_CONF", "none")

    def refusing(self, change: Callable[..., None]) -> Callable[..., None]:
        """Return os.putenv or os.unsetenv for variables that have not been read yet."""

        def changed(name: bytes, *value: bytes) -> None:
            text = os.fsdecode(name)
            for reader, place in self._readers.items():
                if READ_ONCE[reader].fullmatch(text) and os.environb.get(name) != (*value, None)[0]:
                    raise RuntimeError(
                        f"{text} is set after {reader} has started at {place}, and has no effect: "
                        "set it before"
                    )
            change(name, *value)

        return changed


Set = Callable[[Any, str, Any], None]  # setattr, or that of pytest's monkeypatch


def replace_environment(environment: Environment, set_: Set) -> None:
    """Let this process refuse changes of variables that were read."""
    for name in ("putenv", "unsetenv"):  # os.environ calls them
        set_(os, name, environment.refusing(getattr(os, name)))
