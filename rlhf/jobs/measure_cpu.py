"""Measure the rates of this machine's CPU, which plans need. This takes about a second."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from dataclasses import replace

import torch

from rlhf.base.cpu import multiplies_bf16, num_usable_cores
from rlhf.config.machine_rates import CpuRates, store_rates
from rlhf.engine.devices import set_torch_threads

SIZE = 2048  # rows and columns of the multiplied matrices
BUFFER = 2**26  # fp32 elements of the buffer that is read; more than caches hold
CALLS = 2000  # torch operations per try
TRIES = 5  # of each measurement; the fastest counts
# A thread that is alone on its core takes a CPU second per wall-clock second. If the main thread
# takes less than LEAST_SHARE, other programs use its core, or those of threads that it waits for.
LEAST_SHARE = 0.9


def measure_cpu() -> CpuRates:
    """Measure the rates of all cores together, and store them for the plans of this machine."""
    threads = torch.get_num_threads()
    set_torch_threads(num_usable_cores())
    wall, cpu = time.perf_counter(), time.thread_time()
    buffer = torch.ones(BUFFER)
    rates = CpuRates(
        bf16_tflops=_measure_matmul_tflops(torch.bfloat16) if multiplies_bf16() else 0.0,
        fp32_tflops=_measure_matmul_tflops(torch.float32),
        bandwidth_gb=buffer.nbytes / _fastest_seconds(buffer.sum) / 1e9,
        call_microseconds=_measure_microseconds_per_call(),
    )
    set_torch_threads(threads)
    cpu_share = (time.thread_time() - cpu) / (time.perf_counter() - wall)
    rates = replace(rates, was_busy=cpu_share < LEAST_SHARE)
    store_rates(rates)
    return rates


def _measure_matmul_tflops(dtype: torch.dtype) -> float:
    a = torch.ones(SIZE, SIZE, dtype=dtype)
    return 2 * SIZE**3 / _fastest_seconds(lambda: a @ a) / 1e12


def _measure_microseconds_per_call() -> float:
    """Return the microseconds per torch operation on 8 numbers, that is, the call overhead."""
    x = torch.ones(8, requires_grad=True)

    def call_many_times() -> None:
        y = x
        for _ in range(CALLS):
            y = y + x

    return _fastest_seconds(call_many_times) / CALLS * 1e6


def _fastest_seconds(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of ``TRIES`` calls of ``work``; the first warms up."""
    return min(timeit.repeat(work, number=1, repeat=TRIES))
