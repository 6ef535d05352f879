"""Compile the kernel of attention_triton.py for NVIDIA GPUs; test_triton.py starts this file."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from rlhf.kernels import attention_triton
from rlhf.kernels.attention_gpu import FUSED, WARPS, kernel_constants

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARED = 99 * 1024  # bytes of shared memory per program that every GPU since Ampere has


def main() -> None:
    """Compile it for an A100 and an H100, for heads of OPT, Llama and larger ones."""
    for capability in (80, 90):
        for dtype in DTYPES:
            for group, size in ((1, 64), (1, 80), (4, 64), (8, 128), (1, 256)):
                kernel = compiled(dtype, group, size, capability)
                name = f"{dtype}, {group} heads of {size}, sm_{capability}"
                ptx = str(kernel.asm["ptx"])
                assert kernel.metadata.shared <= SHARED, f"{name}: {kernel.metadata.shared} bytes"
                has_wide_reads = "cp.async" in ptx or "ld.global.v4.b32" in ptx
                assert has_wide_reads, f"{name}: reads are narrower than 16 bytes"
                assert "i64" in str(kernel.asm["ttir"]), f"{name}: rows need 64 bits"


def compiled(dtype: str, group: int, size: int, capability: int) -> CompiledKernel:
    """The kernel for strides that are multiples of 16, which ptxas has accepted."""
    function = attention_triton.attend
    fixed = kernel_constants(group, size, DTYPES[dtype])
    pointer = f"*{dtype}"
    signature = {
        "newest": (pointer,) * 3,
        "memory": pointer,
        "positions": "*i64",
        "out": pointer,
        "strides": ("i32",) * 8,
        **dict.fromkeys(fixed, "constexpr"),
    }
    assert [*signature] == [*function.arg_names]
    multiples = [(0, each) for each in range(3)] + [(1,), (2,), (3,)]
    multiples += [(4, each) for each in range(8)]
    divisible = {key: [["tt.divisibility", 16]] for key in multiples}
    source = ASTSource(function, signature, constexprs=fixed, attrs=divisible)
    options = {"num_warps": WARPS, **FUSED}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert kernel.asm["cubin"]
    return kernel


if __name__ == "__main__":
    main()
