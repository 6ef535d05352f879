"""Compile Triton kernels for NVIDIA GPUs, and print what each needs; needs no GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

MAX_SHARED = 99 * 1024  # bytes of shared memory per program that every GPU since Ampere has


def compile_for(source: Any, name: str, capability: int, options: dict[str, Any]) -> CompiledKernel:
    """Compile a kernel; check that ptxas accepts it, that it fits and keeps its registers."""
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    used, shared = _resources(kernel.asm["cubin"]), kernel.metadata.shared
    spilled = used["STACK"] + used["LOCAL"]
    text = f"{name}, sm_{capability}: {used['REG']} registers, {spilled} bytes spilled"
    print(f"{text}, {shared} bytes shared")
    assert spilled == 0, text
    assert shared <= MAX_SHARED, f"{name}: {shared} bytes"
    return kernel


def _resources(cubin: bytes) -> dict[str, int]:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        words = (triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file))
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return {key: int(number) for key, number in re.findall(r"(\w+):(\d+)", found)}
