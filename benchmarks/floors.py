"""What the machine can do at most, and what a rollout, a scoring and a training step need.

    python benchmarks/floors.py

A floor is the least time that the machine's measured rates allow: bytes that must be read over the
measured bandwidth, floating-point operations over the measured rate of large matrix products.
Bandwidth is the best of three readings: a sum over a buffer much larger than the caches, a sum over
a buffer of as many bytes as a decode step reads, so that it has the caches' help where the weights
have it, and products with packed weights of together that size. On a GPU it is a large copy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from common import BENCHMARKS, Samples, Way, start, table
from shapes import SHAPES, Decoder, Shape, Work

FLOORS = "floors"
BYTES = {"fp32": 4, "bf16": 2}


def step_bytes(decoder: Decoder, work: Work, dtype: str) -> float:
    """Bytes that one decode step reads: all weights once, and the keys and values so far.

    Keys and values are those half-way through the responses, in the dtype of the weights.
    """
    context = sum(work.prompt_lengths()) + work.sequences * work.response_tokens / 2
    cached = 2 * decoder.layers * decoder.hidden * context
    return BYTES[dtype] * (decoder.matrices + decoder.head + cached)


def forward_flops(decoder: Decoder, work: Work, *, logits: bool, responses: bool = True) -> float:
    """Operations of one pass over whole sequences (or prompts), logits at response positions alone.

    2 per weight and token; causal attention 2 * layers * width * length^2 per sequence.
    """
    response = work.response_tokens if responses else 0
    lengths = [prompt + response for prompt in work.prompt_lengths()]
    attention = 2 * decoder.layers * decoder.hidden * sum(length**2 for length in lengths)
    head = 2 * decoder.head * work.sequences * response if logits else 0
    return 2 * decoder.matrices * sum(lengths) + attention + head


def iteration_flops(shape: Shape, work: Work, *, reuses_logprobs: bool) -> dict[str, float]:
    """Operations of the three parts of an iteration; a backward pass counts twice its forward."""
    policy = forward_flops(shape.policy, work, logits=True)
    scorer = forward_flops(shape.scorer, work, logits=False)
    return {
        "generate": policy,
        "score": (1 if reuses_logprobs else 2) * policy + 2 * scorer,
        "train": 3 * (policy + scorer),
    }


class Rates(NamedTuple):
    """Measured limits of the machine: bytes per second, and operations per second by dtype."""

    bandwidth: float
    cached: float
    """Bytes per second of one matrix that is read again and again, and may stay in a cache."""
    gemm: dict[str, float]

    @classmethod
    def of(cls, samples: Samples) -> Rates:
        """The best of what was measured."""
        reads = max(max(samples[key]) for key in samples if key.startswith("read_"))
        cached = max(reads, *samples.get("one_matrix", [0.0]))
        keys = {dtype: f"gemm_{dtype}" for dtype in BYTES}
        gemm = {dtype: max(samples[key]) for dtype, key in keys.items() if key in samples}
        return cls(reads, cached, gemm)

    def generation_floor(self, decoder: Decoder, work: Work, dtype: str) -> float:
        """Seconds: the prompts' pass at the rate of products, the other steps at the bandwidth."""
        prompts = forward_flops(decoder, work, logits=False, responses=False) / self.gemm[dtype]
        steps = work.response_tokens - 1
        return prompts + steps * step_bytes(decoder, work, dtype) / self.bandwidth

    def as_json(self) -> dict[str, float]:
        """GB/s and GFLOP/s."""
        rates = {f"gemm_{dtype}_gflop_per_s": rate / 1e9 for dtype, rate in self.gemm.items()}
        reads = {"bandwidth_gb_per_s": self.bandwidth / 1e9, "cached_gb_per_s": self.cached / 1e9}
        return reads | rates

    def in_words(self) -> str:
        """One line under a table."""
        gemm = ", ".join(f"{dtype} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in self.gemm.items())
        reads = (
            f"{self.bandwidth / 1e9:.1f} GB/s, one matrix again and again {self.cached / 1e9:.1f}"
        )
        return f"Rates of this run: reads {reads} GB/s; products {gemm}."


def floors_way(device: str, decoder: Decoder, work: Work, dtypes: Sequence[str]) -> Way:
    """The process that measures the rates, one of the ways that take turns.

    Products are measured in ``dtypes`` only: a CPU without bf16 takes minutes for one in bf16.
    """
    is_micro = decoder.hidden < SHAPES["tiny"].policy.hidden
    task = {
        "device": device,
        "dtypes": list(dtypes),
        "step": int(step_bytes(decoder, work, "bf16")),
        "buffer": 2**24 if is_micro else 2**30,
        "size": 128 if is_micro else 2048 if device == "cpu" else 8192,
        "head": [decoder.vocab, decoder.hidden],
        "rows": work.sequences,
    }
    return Way(script=BENCHMARKS / "floors.py", task=task)


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Rates in bytes and operations per second."""
    import torch

    device = torch.device(task["device"])
    found: dict[str, Any] = {}
    size = task["size"]
    for name in task["dtypes"]:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found[f"gemm_{name}"] = 2 * size**3 / _seconds(lambda a=a, b=b: a @ b, device)
    if device.type == "cuda":
        source = torch.ones(task["buffer"], device=device)
        target = torch.empty_like(source)
        seconds = _seconds(lambda: target.copy_(source), device)
        return found | {"read_copy": 2 * source.nbytes / seconds}
    for name in ("buffer", "step"):
        ones = torch.ones(max(1, task[name] // 4))
        found[f"read_{name}"] = ones.nbytes / _seconds(ones.sum, device)
    found["read_packed"] = _packed_read(task["head"], task["rows"], task["step"])
    return found | {"one_matrix": _packed_read(task["head"], task["rows"], 0)}


def _packed_read(shape: list[int], batch: int, step: int) -> float:
    """Bytes per second of products with packed weights, matrices of ``step`` bytes in turn."""
    import torch

    ops = torch.ops.mkldnn
    dtype = torch.bfloat16 if ops._is_mkldnn_bf16_supported() else torch.float32
    x = torch.randn(batch, shape[1]).to(dtype)
    weight = torch.randn(*shape).to(dtype)
    count = max(1, step // weight.nbytes)
    packed = [ops._reorder_linear_weight(weight, batch) for _ in range(count)]

    def read_all() -> None:
        for each in packed:
            ops._linear_pointwise(x, each, None, "none", [], "")

    return count * weight.nbytes / _seconds(read_all, torch.device("cpu"))


def _seconds(run: Callable[[], Any], device: Any, *, times: int = 9) -> float:
    """The quickest of some runs after a warm-up: a floor is what the machine can do."""
    import torch

    run()
    taken = []
    for _ in range(times):
        _wait(torch, device)
        started = time.perf_counter()
        run()
        _wait(torch, device)
        taken.append(time.perf_counter() - started)
    return min(taken)


def _wait(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure this machine's CPU at the size of an opt125m decode step, and print it."""
    found = floors_way("cpu", SHAPES["opt125m"].policy, Work(), tuple(BYTES)).run()
    rows = [[name, rate / 1e9] for name, rate in found.items()]
    sys.stdout.write(table(["rate", "GB/s or GFLOP/s"], rows) + "\n")


if __name__ == "__main__":
    start(main, measure)
