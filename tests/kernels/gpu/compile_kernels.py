"""Compile the Triton kernels for NVIDIA GPUs, which needs none; test_triton.py starts this.

It prints what each kernel needs: registers, bytes spilled and shared memory.
"""

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from rlhf.kernels.gpu import adamw_triton, attention_triton, logprobs_triton
from rlhf.kernels.gpu import attention_gpu as attention
from rlhf.kernels.gpu import logprobs_gpu as logprobs
from rlhf.kernels.gpu.adamw_gpu import BLOCK, EXACT, WIDEST_LOAD

AMPERE = 80  # older GPUs have too few registers for some kernels, which are slower there
MAX_SHARED = 99 * 1024  # bytes of shared memory per program that every GPU since Ampere has
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGE = ("bf16", 8, 128)  # query heads per key head, and their size, of Llama 3
HEADS = {  # of T4, A100, A6000, L40S, H100 and B200: few, as a compilation takes a second
    75: [("fp16", 4, 64)],
    80: [LARGE, ("fp16", 4, 64)],
    86: [("fp32", 1, 256)],
    89: [("bf16", 7, 64)],
    90: [LARGE, ("fp32", 8, 128)],
    100: [LARGE],
}


def compile_for(source: Any, name: str, capability: int, options: dict[str, Any]) -> CompiledKernel:
    """Compile a kernel; check that ptxas accepts it, that it fits and keeps its registers."""
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        words = (triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file))
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    used = {key: int(number) for key, number in re.findall(r"(\w+):(\d+)", found)}
    spilled, shared = used["STACK"] + used["LOCAL"], kernel.metadata.shared
    text = f"{name}, sm_{capability}: {used['REG']} registers, {spilled} bytes spilled"
    print(f"{text}, {shared} bytes shared")
    assert spilled == 0 or capability < AMPERE, text
    assert shared <= MAX_SHARED, f"{name}: {shared} bytes"
    return kernel


def has_wide_reads(ptx: str) -> bool:
    return "ld.global.v4.b32" in ptx or "cp.async" in ptx  # 16 bytes


def check_adamw(name: str, last: str, **flags: bool) -> None:
    """Compile a kernel of AdamW; check that its results are exact."""
    constants = {"ALIGN": WIDEST_LOAD, "BLOCK": BLOCK, **flags}
    kinds = {"addresses": "*i64", "chunks": "*i64", last: "*fp32"}
    kinds |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=getattr(adamw_triton, name), signature=kinds, constexprs=constants)
    ptx = str(compile_for(source, f"{name} {constants}", 90, EXACT).asm["ptx"])
    assert has_wide_reads(ptx), name
    assert not re.search(r"\bfma", ptx), f"{name}: operations are fused"
    assert not re.search(r"(div|sqrt)\.(approx|full)", ptx), f"{name}: is not exact"


def compile_aligned(
    function: Any, signature: dict[str, Any], fixed: dict[str, Any], odd: set[str], **how: Any
) -> CompiledKernel:
    """Compile a kernel whose arguments are multiples of 16, except ``odd`` and the last strides."""
    multiples: list[tuple[int, ...]] = []
    for at, (name, kind) in enumerate(signature.items()):
        parts = [(at,)] if isinstance(kind, str) else [(at, i) for i in range(len(kind))]
        multiples += [] if name in odd else parts[: 8 if name == "strides" else None]
    signature = {**signature, **dict.fromkeys(fixed, "constexpr")}
    assert [*signature] == [*function.arg_names]
    divisible = {key: [["tt.divisibility", 16]] for key in multiples}
    source = ASTSource(function, signature, constexprs=fixed, attrs=divisible)
    kernel = compile_for(source, **how)
    assert has_wide_reads(str(kernel.asm["ptx"])), how["name"]
    return kernel


def check_attention(dtype: str, group: int, size: int, capability: int) -> None:
    """Compile both kernels of attention, of which the first reads pages or whole rows."""
    whole_rows, paged = (
        attention.choose_kernel_constants(group, size, DTYPES[dtype], is_paged=is_paged)
        for is_paged in (False, True)
    )
    heads, parts = f"{dtype}, {group} heads of {size}", ("*fp32",) * 2
    signature = {
        "newest": (f"*{dtype}",) * 3,
        "kv_cache": f"*{dtype}",
        "pages": "*i64",
        "positions": "*i64",
        "parts": parts,
        "strides": ("i32",) * 10,
    }
    how = {"capability": capability, "name": f"attend, {heads}"}
    options = {"num_warps": attention.WARPS, **attention.FUSED}
    if capability == max(HEADS):  # of rows that are a single chunk
        whole = {**signature, "parts": (f"*{dtype}", "*fp32")}
        compile_aligned(attention_triton.attend, whole, whole_rows, set(), **how, options=options)
    for fixed in (whole_rows, paged):
        kernel = compile_aligned(
            attention_triton.attend, signature, fixed, set(), **how, options=options
        )
        # Of the key head: by its query heads, if several, and by the stride from keys to values.
        narrow = 2 + (group > 1)
        assert count_narrow_products(kernel) == narrow, f"{heads}: only offsets of heads fit"
    signature = {"parts": parts, "positions": "*i64", "out": f"*{dtype}", "chunks": "i32"}
    how["name"] = f"combine, {heads}"
    options["num_warps"] = 1
    sizes = {"SIZES": paged["SIZES"]}
    kernel = compile_aligned(
        attention_triton.combine, signature, sizes, {"chunks"}, **how, options=options
    )
    assert count_narrow_products(kernel) == 0, f"{heads}: rows need 64 bits"


def count_narrow_products(kernel: CompiledKernel) -> int:
    """Return the number of products of two scalars of 32 bits, such as head * stride."""
    return len(re.findall(r"arith\.muli .*: i32\b", str(kernel.asm["ttir"])))


def check_logprobs(name: str, dtype: str) -> None:
    """Compile a kernel of log-probabilities for any vocabulary, in rows padded to 16 logits."""
    function = getattr(logprobs_triton, name)
    known: dict[str, Any] = {"logits": f"*{dtype}", "ids": "*i64", "outs": ("*fp32",) * 3}
    known |= {"log_sums": "*fp32", "slopes": "*fp32", "scale": "fp32", "size": "i32"}
    known["stride"] = "i32"
    signature = {key: known[key] for key in function.arg_names if key != "BLOCK"}
    kernel = compile_aligned(
        function,
        signature,
        {"BLOCK": logprobs.BLOCK},
        {"scale", "size"},
        name=f"{name}, {dtype}",
        capability=90,
        options={"num_warps": logprobs.WARPS, **logprobs.FUSED},
    )
    ptx = str(kernel.asm["ptx"])
    assert "ld.global.v4.b32" in ptx, f"{name}: reads are narrow"
    assert name == "reduce_row_kernel" or "st.global.v4.b32" in ptx, f"{name}: writes are narrow"
    exps, own = ptx.count("ex2.approx"), logprobs.BLOCK // (32 * logprobs.WARPS)
    assert exps <= own + 1, f"{name}: {exps} exponentials for {own} logits of a thread"
    products = re.findall(r"arith\.muli .*: (\S+)", str(kernel.asm["ttir"]))
    assert products == ["i64"], f"{name}: row * stride needs 64 bits, not {products}"


def main() -> None:
    """Compile each kernel."""
    check_adamw("sum_squares_kernel", "sums")
    check_adamw("average_kernel", "share")
    for half in (False, True):
        check_adamw("adamw_step_kernel", "scalars", HALF=half)
    for capability, heads in HEADS.items():
        for kind in heads:
            check_attention(*kind, capability)
    for name in ("reduce_row_kernel", "gradient_kernel"):
        for dtype in ("bf16", "fp32"):
            check_logprobs(name, dtype)


if __name__ == "__main__":
    main()
