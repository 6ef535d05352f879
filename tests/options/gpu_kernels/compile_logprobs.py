"""Compile the kernels of logprobs_triton.py for NVIDIA GPUs; test_triton.py starts this file."""

from __future__ import annotations

import re

from triton.compiler import ASTSource, CompiledKernel

from rlhf.options.gpu_kernels import logprobs_triton
from rlhf.options.gpu_kernels.logprobs_gpu import BLOCK, FUSED, WARPS
from tests.options.gpu_kernels.compiling_for_gpus import compile_for

VECTORS = {"log_sums": "*fp32", "entropies": "*fp32", "picked": "*fp32", "slopes": "*fp32"}


def main() -> None:
    """Compile each kernel; check widths of reads and writes, and the work per logit."""
    for name in ("reduce_row_kernel", "gradient_kernel"):
        for dtype in ("bf16", "fp16", "fp32"):
            kernel = compiled(name, dtype)[0]
            ptx = str(kernel.asm["ptx"])
            assert "ld.global.v4.b32" in ptx, f"{name}: reads are narrower than 16 bytes"
            assert name == "reduce_row_kernel" or "st.global.v4.b32" in ptx, (
                f"{name}: so are its writes"
            )
            exps, own = ptx.count("ex2.approx"), BLOCK // (32 * WARPS)
            assert exps <= own + 1, f"{name}: {exps} exponentials for {own} logits of a thread"
            products = re.findall(r"arith\.muli .*: (\S+)", str(kernel.asm["ttir"]))
            assert products == ["i64"], f"{name}: row * size needs 64 bits, not {products}"


def compiled(name: str, dtype: str) -> list[CompiledKernel]:
    """The kernel of each GPU, for rows whose length is a multiple of 16."""
    function = getattr(logprobs_triton, name)
    known = {"logits": f"*{dtype}", "ids": "*i64", "scale": "fp32", "size": "i32"} | VECTORS
    signature = {key: known.get(key, "constexpr") for key in function.arg_names}
    multiples = [key for key in signature if key not in {"scale", "BLOCK"}]
    divisible = {(function.arg_names.index(key),): [["tt.divisibility", 16]] for key in multiples}
    source = ASTSource(function, signature, constexprs={"BLOCK": BLOCK}, attrs=divisible)
    options = {"num_warps": WARPS, **FUSED}
    return [compile_for(source, f"{name}, {dtype}", each, options) for each in (80, 90)]


if __name__ == "__main__":
    main()
