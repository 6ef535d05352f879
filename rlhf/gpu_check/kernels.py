"""Compare each Triton kernel with torch at the sizes of real models, and measure its bandwidth.

Shapes: N = tokens, V = vocabulary, B = rows, G = pages of a row, H = heads of queries, keys and
values, D = head size.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, cycle, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.gpu_check.rows import CheckRow, Size, Task, checked_row, skipped_row
from rlhf.kernels import kernels_for
from rlhf.kernels.checked import (
    SCALARS,
    compare_adamw,
    compare_attention,
    compare_logprobs,
    random_states,
)
from rlhf.kernels.gpu.attention_gpu import CHUNK
from rlhf.kernels.kernel_checks import Pairs, replaced_kernels

GPU = torch.device("cuda", 0)
SHAPES: Mapping[str, Any] = read_yaml_beside(__file__, "shapes.yaml")
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
REPEATS = 10  # launches that are timed
MOST_ROWS = 256  # rows to compare: fp64 copies of more rows may not fit into memory
# Largest relative errors that rounding explains, in Euclidean norms.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check_kernels(_: Path, size: Size) -> Iterator[Task]:
    """Yield a task for each kernel, shape and precision."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    sizes = SHAPES["kernels"][size]
    for (tokens, vocabulary), dtype in product(sizes["logits"], (bf16, fp32)):
        name = f"log-probs, {tokens} x {vocabulary}, {DTYPE_NAMES[dtype]}"
        yield name, partial(_check_logprobs, tokens, vocabulary, dtype)
    for cache, dtype in product(sizes["caches"], (bf16, fp16, fp32)):
        rows, heads, kv_heads, head, columns = cache
        gib = 2 * rows * kv_heads * columns * head * dtype.itemsize / 2**30
        name = f"{rows} rows, {heads}/{kv_heads} heads of {head}, KV cache {gib:.2g} GiB"
        yield f"attention, {name}, {DTYPE_NAMES[dtype]}", partial(_check_attention, cache, dtype)
    for moments in (fp32, bf16):
        check = partial(_check_adamw, sizes["weights"], moments)
        yield f"AdamW, moments in {DTYPE_NAMES[moments]}", check


def _seconds_per_launch(launch: Callable[[], object], *, in_graph: bool = False) -> float:
    """Return the mean seconds of REPEATS launches, after a first launch that may compile.

    ``in_graph`` replays a CUDA graph of the launches, as decoding does: without a graph, a small
    kernel takes as long as its launch by Python.
    """
    launch()

    def launch_all() -> None:
        for _ in range(REPEATS):
            launch()

    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch_all()
        launch_all = graph.replay
        launch_all()
    torch.cuda.synchronize()
    began = time.perf_counter()
    launch_all()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / REPEATS


def _replaced_row(name: str) -> CheckRow:
    """Return the row of a kernel that torch replaces: failed for a large error, else skipped."""
    line = next(line for line in replaced_kernels() if f"replaces {name}" in line)
    is_wrong = "its error is" in line
    return checked_row(False, line, "as torch") if is_wrong else skipped_row(line)


def _worst_errors(names: Iterable[str], pairs: Pairs) -> dict[str, float]:
    """Return by name the largest |result - expected| / |expected| of a pair, in Euclidean norms."""
    errors: defaultdict[str, list[Tensor]] = defaultdict(list)
    for name, (result, torch_result) in zip(names, pairs, strict=False):
        expected = torch_result.double()
        errors[name].append((result.double() - expected).norm() / expected.norm())
    return {name: float(torch.stack(norms).max()) for name, norms in errors.items()}  # keeps NaN


def _build_row(
    errors: Mapping[str, float], allowed: Mapping[str, float], seconds: float, moved_bytes: float
) -> CheckRow:
    """Return a row with errors and bandwidth; it passes if no error exceeds ``allowed``."""
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    bounds = ", ".join(f"{name} {bound:.0e}" for name, bound in allowed.items())
    return checked_row(
        all(errors[name] <= bound for name, bound in allowed.items()),
        f"{shown}; {1e3 * seconds:.2f} ms, {moved_bytes / seconds / 1e9:,.0f} GB/s",
        f"relative errors up to {bounds}",
        seconds=seconds,
        bytes_per_second=moved_bytes / seconds,
        **errors,
    )


@torch.no_grad()
def _check_logprobs(tokens: int, vocabulary: int, dtype: torch.dtype) -> CheckRow:
    logits_NV = torch.empty(tokens, vocabulary, dtype=dtype, device=GPU)
    if (kernel := kernels_for("cuda").logprobs_kernel(logits_NV)) is None:
        return _replaced_row("log-probs")
    torch.manual_seed(1)
    names = ("log-sum-exp", "entropy", "logit", "gradient")
    errors = _worst_errors(names, compare_logprobs(kernel, rows=logits_NV, compared=MOST_ROWS))
    ids_N, outs = torch.randint(vocabulary, (tokens,), device=GPU), torch.zeros(3, tokens)
    reduce = partial(kernel.reduce_logits, logits_NV.normal_(), ids_N, scale=1.0)
    seconds = _seconds_per_launch(partial(reduce, outs=tuple(outs.to(GPU))))
    allowed = dict.fromkeys(names, ROUNDING[torch.float32]) | {"gradient": ROUNDING[dtype]}
    return _build_row(errors, allowed, seconds, logits_NV.nbytes)


@torch.no_grad()
def _check_attention(cache: Sequence[int], dtype: torch.dtype) -> CheckRow:
    rows, heads, kv_heads, size, columns = cache
    group, pages = heads // kv_heads, -(-columns // CHUNK)
    kv_cache = torch.zeros(2, rows * pages, kv_heads, CHUNK, size, dtype=dtype, device=GPU)
    if (kernel := kernels_for("cuda").attention_kernel(kv_cache, group)) is None:
        return _replaced_row("attention")
    torch.manual_seed(1)
    names = ("stored token", "output")
    pages_BG = torch.randperm(rows * pages, device=GPU).view(rows, pages)
    errors = _worst_errors(cycle(names), compare_attention(kv_cache, pages_BG, group, kernel))
    joint_BHD = torch.randn(rows, heads + 2 * kv_heads, size, dtype=dtype, device=GPU)
    query, key, value = torch.split(joint_BHD, [heads, kv_heads, kv_heads], dim=1)
    positions_B = torch.randint(columns, (rows,), device=GPU)
    moved_bytes = 2 * kv_heads * size * dtype.itemsize * int(positions_B.sum())
    launch = partial(kernel, query, key, value, kv_cache, pages_BG, positions_B, columns)
    seconds = _seconds_per_launch(launch, in_graph=True)
    allowed = dict(zip(names, (0.0, ROUNDING[dtype]), strict=True))
    return _build_row(errors, allowed, seconds, moved_bytes)


@torch.no_grad()
def _check_adamw(sizes: Sequence[int], moments: torch.dtype) -> CheckRow:
    load = partial(kernels_for("cuda").adamw_kernel, sizes, GPU, moments)
    if (table := load()) is None:
        return _replaced_row("AdamW")
    torch.manual_seed(1)
    names = chain(["norm"], cycle(("weights", "first moment", "second moment")))
    errors = _worst_errors(names, compare_adamw(load, sizes, GPU, moments, table))
    allowed = {name: ROUNDING[moments if "moment" in name else torch.float32] for name in errors}
    step = partial(table.step, *random_states(sizes, GPU, moments), [SCALARS] * len(sizes))
    # Bytes: a gradient is read; weights and moments are read and written.
    per_weight = 2 + 2 * (4 + 2 * moments.itemsize)
    return _build_row(errors, allowed, _seconds_per_launch(step), per_weight * sum(sizes))
