"""Compare each Triton kernel with fp64 at the sizes of real models, and measure its bandwidth.

Shapes: N = tokens, F = first tokens, which are compared, V = vocabulary, B = rows, Q = query heads,
K = key/value heads, D = head size, L = columns of the KV cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.engine.masters import AdamwScalars, Split, SplitState
from rlhf.gpu_check.rows import (
    CheckSetting,
    Finding,
    Size,
    Task,
    checked_finding,
    skipped_finding,
)
from rlhf.options import kernels_for
from rlhf.options.kernel_checks import replaced_kernels

GPU = torch.device("cuda", 0)
REPEATS = 10
FEW = 256  # rows to compare: fp64 copies of more rows may not fit into the GPU's memory
SCALE = 1.25  # factor on the logits, in the place of 1 / temperature
# Largest relative errors that rounding explains, in Euclidean norms.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# (tokens, vocabulary) of Qwen 3, Llama 3 and GPT-NeoX, whose vocabulary is no multiple of 16.
LOGITS = {
    Size.full: ((4096, 151936), (4096, 128256), (4096, 50257)),
    Size.tiny: ((64, 2051), (32, 4096)),
}


class AttentionShape(NamedTuple):
    """The shape of an attention: rows, query heads, key/value heads, head size, columns."""

    rows: int
    heads: int
    kv_heads: int
    size: int
    columns: int


# KV caches of Llama 3.1 8B (over 2^31 numbers), OPT-1.3B, Qwen 2.5 0.5B, Gemma 3 and OPT-2.7B.
CACHES = {
    Size.full: (
        AttentionShape(160, 32, 8, 128, 8192),
        AttentionShape(128, 32, 32, 64, 1024),
        AttentionShape(4, 14, 2, 64, 8192),
        AttentionShape(64, 4, 1, 256, 2048),
        AttentionShape(64, 32, 32, 80, 1024),
    ),
    Size.tiny: (AttentionShape(3, 4, 2, 24, 40),),
}
# Sizes of the tensors to update; most are no multiple of the kernel's block size.
WEIGHTS = {Size.full: (4096 * 14336, 50257 * 1024, 3 * 2**16 + 7, 1), Size.tiny: (70_001, 1)}
SCALARS = AdamwScalars(0.37, 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975)


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield a task for each kernel, shape and precision."""
    for tokens, vocabulary in LOGITS[setting.size]:
        for dtype in (torch.bfloat16, torch.float32):
            yield Task(
                f"log-probs, {tokens} x {vocabulary}, {_dtype_name(dtype)}",
                partial(_check_logprobs, tokens, vocabulary, dtype),
            )
    for cache in CACHES[setting.size]:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            gib = 2 * cache.rows * cache.kv_heads * cache.columns * cache.size * dtype.itemsize
            what = f"attention, {cache.rows} rows, {cache.heads}/{cache.kv_heads} heads of"
            yield Task(
                f"{what} {cache.size}, KV cache {gib / 2**30:.2g} GiB, {_dtype_name(dtype)}",
                partial(_check_attention, cache, dtype),
            )
    for moments in (torch.float32, torch.bfloat16):
        yield Task(
            f"AdamW, moments in {_dtype_name(moments)}",
            partial(_check_adamw, WEIGHTS[setting.size], moments),
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _seconds_per_launch(launch: Callable[[], object], *, in_graph: bool = False) -> float:
    """Return the mean seconds of REPEATS launches, after a first launch that may compile.

    ``in_graph`` replays a CUDA graph of the launches, as decoding does: without it a small kernel
    takes as long as its launch by Python.
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


def _replaced_finding(name: str) -> Finding:
    """Return why torch replaces a kernel: it was wrong, or it does not run here."""
    line = next(line for line in replaced_kernels() if f"replaces {name}" in line)
    is_wrong = "its error is" in line
    return checked_finding(False, line, "as torch") if is_wrong else skipped_finding(line)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected| in Euclidean norms."""
    return float((found.double() - expected).norm() / expected.norm())


def _build_finding(
    errors: Mapping[str, float], allowed: Mapping[str, float], seconds: float, moved: float
) -> Finding:
    """Return a finding with errors and bandwidth; it passes if no error exceeds ``allowed``."""
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    bounds = ", ".join(f"{name} {bound:.0e}" for name, bound in allowed.items())
    return checked_finding(
        all(errors[name] <= bound for name, bound in allowed.items()),
        f"{shown}; {1e3 * seconds:.2f} ms, {moved / seconds / 1e9:,.0f} GB/s",
        f"relative errors up to {bounds}",
        seconds=seconds,
        bytes_per_second=moved / seconds,
        **errors,
    )


@torch.no_grad()
def _check_logprobs(tokens: int, vocabulary: int, dtype: torch.dtype) -> Finding:
    logits_NV = torch.empty(tokens, vocabulary, dtype=dtype, device=GPU)
    if (kernel := kernels_for("cuda").logprobs_kernel(logits_NV)) is None:
        return _replaced_finding("log-probs")
    torch.manual_seed(1)
    logits_NV.normal_(std=3)
    ids_N = torch.randint(vocabulary, (tokens,), device=GPU)
    slopes_N = torch.randn(tokens, device=GPU)
    few = slice(0, FEW)
    x_FV, ids_F1 = SCALE * logits_NV[few].double(), ids_N[few, None]
    log_sum_F1 = x_FV.logsumexp(1, keepdim=True)
    p_FV = (x_FV - log_sum_F1).exp()
    entropy_F1 = log_sum_F1 - (p_FV * x_FV).sum(1, keepdim=True)
    logit_F1 = x_FV.gather(1, ids_F1)
    gradient_FV = p_FV.neg_().scatter_add_(1, ids_F1, torch.ones_like(logit_F1))
    gradient_FV *= SCALE * slopes_N[few, None]

    log_sum_N, entropy_N, logit_N = torch.full((3, tokens), torch.nan, device=GPU)
    outs = (log_sum_N, entropy_N, logit_N)
    seconds = _seconds_per_launch(
        lambda: kernel.reduce_logits(logits_NV, ids_N, scale=SCALE, outs=outs)
    )
    kernel.replace_by_gradient_(
        logits_NV, ids_N, scale=SCALE, log_sums_N=log_sum_N, slopes_N=slopes_N
    )
    errors = {
        "log-sum-exp": _relative_error(log_sum_N[few], log_sum_F1[:, 0]),
        "entropy": _relative_error(entropy_N[few], entropy_F1[:, 0]),
        "logit": _relative_error(logit_N[few], logit_F1[:, 0]),
        "gradient": _relative_error(logits_NV[few], gradient_FV),
    }
    allowed = dict.fromkeys(errors, ROUNDING[torch.float32])
    allowed["gradient"] = ROUNDING[dtype]
    return _build_finding(errors, allowed, seconds, logits_NV.nbytes)


@torch.no_grad()
def _check_attention(cache: AttentionShape, dtype: torch.dtype) -> Finding:
    rows, heads, kv_heads, size, columns = cache
    kv_cache = torch.empty(2, rows, kv_heads, columns, size, dtype=dtype, device=GPU)
    if (kernel := kernels_for("cuda").attention_kernel(kv_cache, heads // kv_heads)) is None:
        return _replaced_finding("attention")
    torch.manual_seed(1)
    kv_cache.normal_()
    # One tensor with queries, keys and values, as a joint linear layer returns it.
    joint_BHD = torch.randn(rows, heads + 2 * kv_heads, size, device=GPU)
    parts = [heads, kv_heads, kv_heads]
    query_BQD, key_BKD, value_BKD = torch.split(joint_BHD.to(dtype), parts, dim=1)
    positions_B = torch.randint(columns, (rows,), device=GPU)
    positions_B[0], positions_B[-1] = 0, columns - 1
    attend = partial(kernel, query_BQD, key_BKD, value_BKD, kv_cache, positions_B)
    out_BQD = attend()
    errors = []
    for row in {0, 1, rows // 2, rows - 1}:
        end = int(positions_B[row]) + 1
        keys_KLD, values_KLD = kv_cache[:, row, :, :end].double()
        q_KGD = query_BQD[row].double().view(kv_heads, heads // kv_heads, size)
        weights = (q_KGD @ keys_KLD.mT * size**-0.5).softmax(-1)
        errors.append(
            _relative_error(out_BQD[row].reshape(kv_heads, -1, size), weights @ values_KLD)
        )
        is_stored = torch.equal(kv_cache[0, row, :, end - 1], key_BKD[row])
        if not (is_stored and torch.equal(kv_cache[1, row, :, end - 1], value_BKD[row])):
            return checked_finding(False, f"row {row}: another token is stored", "the newest")
    moved = 2 * kv_heads * size * dtype.itemsize * int(positions_B.sum())
    error = {"output": float(torch.tensor(errors).max())}
    seconds = _seconds_per_launch(attend, in_graph=True)
    return _build_finding(error, {"output": ROUNDING[dtype]}, seconds, moved)


@torch.no_grad()
def _check_adamw(sizes: tuple[int, ...], moments: torch.dtype) -> Finding:
    if (table := kernels_for("cuda").adamw_kernel(sizes, GPU, moments)) is None:
        return _replaced_finding("AdamW")
    torch.manual_seed(1)

    states, expected, gradients = [], [], []
    for size in sizes:
        weights, gradient, mean = torch.randn(3, size, device=GPU)
        state = SplitState(
            high=torch.empty_like(weights, dtype=torch.bfloat16),
            low=torch.empty_like(weights, dtype=torch.int16),
            first=mean.to(moments),
            second=mean.square().to(moments),
        )
        expected.append(_adamw_step_in_fp64(weights, gradient.bfloat16(), state))
        Split(state.high, state.low).split(weights)
        gradients.append(gradient.bfloat16())
        states.append(state)
    step = partial(table.step, states, gradients, [SCALARS] * len(sizes))
    step()
    found = []
    for state, theirs in zip(states, expected, strict=True):
        joined, spare = torch.empty(2, state.low.numel(), device=GPU)
        ours = (Split(state.high, state.low).join(joined, spare), state.first, state.second)
        found.append([_relative_error(*pair) for pair in zip(ours, theirs, strict=True)])
    worst = torch.tensor(found).amax(0).tolist()  # unlike max(), it keeps NaN
    errors = dict(zip(("weights", "first moment", "second moment"), worst, strict=True))
    squares = sum(float(each.double().square().sum()) for each in gradients)
    errors["norm"] = abs(float(table.sum_of_squares(gradients)) / squares - 1)
    allowed = {name: ROUNDING[moments if "moment" in name else torch.float32] for name in errors}
    # Bytes: a gradient is read; weights and moments are read and written.
    per_weight = 2 + 2 * (4 + 2 * moments.itemsize)
    return _build_finding(errors, allowed, _seconds_per_launch(step), per_weight * sum(sizes))


def _adamw_step_in_fp64(weights: Tensor, gradient: Tensor, state: SplitState) -> list[Tensor]:
    """Return weights and both moments after the step; ``state`` has the moments before it."""
    scaled = SCALARS.scale * gradient.double()
    first, second = state.first.double(), state.second.double()
    first += (1.0 - SCALARS.beta1) * (scaled - first)
    second.mul_(SCALARS.beta2).add_((1.0 - SCALARS.beta2) * scaled.square())
    root = (second / SCALARS.correction2).sqrt() + SCALARS.eps
    kept = (1.0 - SCALARS.lr * SCALARS.decay) * weights.double()
    return [kept - SCALARS.lr / SCALARS.correction1 * first / root, first, second]
