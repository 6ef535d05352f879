"""Measure the rates of this machine's CPU, which plans need; takes about a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from rlhf.base.cpu import cores, multiplies_bf16
from rlhf.config.cpu_rates import CpuRates, keep_rates

SIZE = 2048  # rows and columns of the multiplied matrices
BUFFER = 2**26  # fp32 elements of the buffer that is read; more than caches hold
CALLS = 2000
# Seconds of CPU time per second, of which a process on one core gets at most 1. Below this, other
# programs used the cores.
IDLE = 0.9


def measure_cpu() -> CpuRates:
    """Measure the rates of all cores together, and store them for the plans of this machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())
    wall, cpu = time.perf_counter(), time.process_time()
    rates = CpuRates(
        bf16_tflops=_products(torch.bfloat16) if multiplies_bf16() else 0.0,
        fp32_tflops=_products(torch.float32),
        bandwidth_gb=_bandwidth(),
        call_microseconds=_call(),
    )
    torch.set_num_threads(threads)
    own_share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    rates = replace(rates, was_busy=own_share < IDLE)
    keep_rates(rates)
    return rates


def _products(dtype: torch.dtype) -> float:
    """Return the TFLOP/s of large matrix products."""
    a = torch.ones(SIZE, SIZE, dtype=dtype)
    return 2 * SIZE**3 / _best(lambda: a @ a) / 1e12


def _bandwidth() -> float:
    """Return the GB/s of reading a large buffer from memory."""
    buffer = torch.ones(BUFFER)
    return buffer.nbytes / _best(buffer.sum) / 1e9


def _call() -> float:
    """Return the microseconds of an operation on so few numbers that only the call takes time."""
    x = torch.ones(8, requires_grad=True)

    def calls() -> None:
        y = x
        for _ in range(CALLS):
            y = y + x

    return _best(calls) / CALLS * 1e6


def _best(work: Callable[[], object], *, tries: int = 4) -> float:
    """Return the seconds of the fastest of ``tries`` runs, after a warm-up run."""
    work()
    seconds = []
    for _ in range(tries):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
