"""Compile the kernel of attention_triton.py for NVIDIA GPUs; test_triton.py starts this file."""

from __future__ import annotations

import torch
from triton.compiler import ASTSource, CompiledKernel

from rlhf.options.gpu_kernels import attention_triton
from rlhf.options.gpu_kernels.attention_gpu import FUSED, WARPS, choose_kernel_constants
from tests.options.gpu_kernels.compiling_for_gpus import compile_for

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGE = ("bf16", 8, 128)  # query heads per key head, and their size, of Llama 3
HEADS = {  # of A100, A6000, RTX 4090 and H100: few, as a compilation takes a second
    80: [LARGE, ("fp32", 1, 80), ("fp16", 4, 64)],
    86: [("fp32", 1, 256)],
    89: [("fp16", 1, 256)],
    90: [LARGE, ("bf16", 1, 64), ("fp32", 8, 128)],
}


def main() -> None:
    """Compile it for heads of OPT, Llama and larger ones."""
    for capability, heads in HEADS.items():
        for dtype, group, size in heads:
            name = f"attend, {dtype}, {group} heads of {size}"
            kernel = compiled(name, dtype, group, size, capability)
            ptx = str(kernel.asm["ptx"])
            has_wide_reads = "cp.async" in ptx or "ld.global.v4.b32" in ptx
            assert has_wide_reads, f"{name}: reads are narrower than 16 bytes"
            assert "i64" in str(kernel.asm["ttir"]), f"{name}: rows need 64 bits"


def compiled(name: str, dtype: str, group: int, size: int, capability: int) -> CompiledKernel:
    """The kernel for strides that are multiples of 16."""
    function = attention_triton.attend
    fixed = choose_kernel_constants(group, size, DTYPES[dtype])
    pointer = f"*{dtype}"
    signature = {
        "newest": (pointer,) * 3,
        "kv_cache": pointer,
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
    return compile_for(source, name, capability, {"num_warps": WARPS, **FUSED})


if __name__ == "__main__":
    main()
