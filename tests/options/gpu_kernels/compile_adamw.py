"""Compile the Triton kernels for NVIDIA GPUs, which needs none; test_triton.py starts this."""

from __future__ import annotations

import re
from typing import Any

from triton.compiler import ASTSource

from rlhf.options.gpu_kernels import adamw_triton
from rlhf.options.gpu_kernels.adamw_gpu import BLOCK, EXACT, WIDE
from tests.options.gpu_kernels.compiling_for_gpus import compile_for

LAST = {"sum_squares_kernel": "sums", "adamw_step_kernel": "scalars", "average_kernel": "share"}


def main() -> None:
    """Compile each kernel; check that reads are wide and results exact."""
    for name, last in LAST.items():
        for half in ({"HALF": False}, {"HALF": True}) if name == "adamw_step_kernel" else ({},):
            for ptx in compiled(name, last, {"ALIGN": WIDE, "BLOCK": BLOCK, **half}):
                assert "ld.global.v4.b32" in ptx, f"{name}: reads are narrower than 16 bytes"
                assert not re.search(r"\bfma", ptx), f"{name}: operations are fused"
                assert not re.search(r"(div|sqrt)\.(approx|full)", ptx), f"{name}: is not exact"


def compiled(name: str, last: str, constants: dict[str, Any]) -> list[str]:
    """The assembly of a kernel for each GPU."""
    kinds = {
        "addresses": "*i64",
        "parts": "*i64",
        last: "*fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    source = ASTSource(fn=getattr(adamw_triton, name), signature=kinds, constexprs=constants)
    kernels = [compile_for(source, f"{name} {constants}", each, EXACT) for each in (80, 90)]
    return [str(kernel.asm["ptx"]) for kernel in kernels]


if __name__ == "__main__":
    main()
