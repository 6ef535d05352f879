"""torch.cuda as on a machine with GPUs: what a CPU build of torch lacks, over a pretended GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.amp.common

from tests.pretend_cuda.environment import Set, replace_environment
from tests.pretend_cuda.gpu import Gpu
from tests.pretend_cuda.nccl import replace_collectives

ARCHITECTURES = [f"sm_{number}" for number in (75, 80, 86, 90, 100, 120)]  # of torch 2.13

NEED_NO_CUDA = {"is_available", "is_initialized", "device_count", "_lazy_call", "get_arch_list"}
NEED_NO_CUDA |= {"_is_in_bad_fork", "initial_seed", "manual_seed", "manual_seed_all"}


def replace(gpu: Gpu, set_: Set) -> None:
    """Replace the functions of torch.cuda that call what a CPU build does not have."""
    for functions in (_devices(gpu), _memory(gpu), _randomness(), _queues(gpu)):
        for name, function in functions.items():
            starts = name not in NEED_NO_CUDA and not isinstance(function, type)
            set_(torch.cuda, name, _starting(gpu, function) if starts else function)
    for name in ("range_push", "range_pop", "mark"):
        set_(torch.cuda.nvtx, name, lambda *_: None)
    replace_collectives(gpu, set_)
    replace_environment(gpu.environment, set_)
    set_(torch.version, "cuda", "13.0")
    set_(torch.backends.cuda, "is_built", lambda: True)
    set_(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)


def _starting(gpu: Gpu, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that starts CUDA, which reads its environment then."""

    @wraps(function)
    def started(*args: Any, **how: Any) -> Any:
        gpu.environment.read("CUDA")
        return function(*args, **how)

    return started


def _devices(gpu: Gpu) -> dict[str, Any]:
    card = gpu.card
    major, minor = card.capability
    properties = SimpleNamespace(
        name=card.name,
        total_memory=card.memory,
        major=major,
        minor=minor,
        multi_processor_count=108,
        is_integrated=False,
    )

    def exchange(device: int) -> int:
        before = gpu.current_device()
        gpu.set_device(device)
        return before

    return {
        "is_available": lambda: gpu.devices > 0,
        "is_initialized": lambda: True,
        "device_count": lambda: gpu.devices,
        "current_device": gpu.current_device,
        "set_device": gpu.set_device,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "_is_in_bad_fork": lambda: False,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "is_bf16_supported": lambda *_, **__: True,  # as on old cards, which emulate it
        "get_device_capability": lambda *_: card.capability,
        "get_device_name": lambda *_: card.name,
        "get_device_properties": lambda *_: properties,
        "get_arch_list": lambda: ARCHITECTURES,
        "synchronize": lambda *_: torch.Stream(device="cuda").synchronize(),
    }


def _memory(gpu: Gpu) -> dict[str, Any]:
    return {
        "empty_cache": lambda: None,
        "set_per_process_memory_fraction": lambda share, *_: gpu.limit(
            int(share * gpu.card.memory)
        ),
        "ipc_collect": lambda: None,
        "mem_get_info": lambda *_: (gpu.card.memory - gpu.used, gpu.card.memory),
        "memory_allocated": lambda *_: gpu.used,
        "memory_reserved": lambda *_: gpu.used,
        "max_memory_allocated": lambda *_: gpu.peak,
        "max_memory_reserved": lambda *_: gpu.peak,
        "memory_stats": lambda *_: {"allocated_bytes.all.peak": gpu.peak},
        "reset_peak_memory_stats": lambda *_: gpu.reset_peak(),
    }


def _randomness() -> dict[str, Any]:
    """Return the functions of the GPU's generator, which is the CPU's here."""
    return {
        "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None,
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }


def _queues(gpu: Gpu) -> dict[str, Any]:
    handles = count()

    class CudaGraph(Graph):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(gpu)

    return {
        "Stream": Stream,
        "Event": StreamEvent,
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "stream": _nothing,
        "CUDAGraph": CudaGraph,
        "graph": capturing,
        "graph_pool_handle": lambda: next(handles),
        "is_current_stream_capturing": lambda: gpu.is_capturing,
    }


@contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


class Stream(torch.Stream):
    """A queue of the GPU; here everything has been computed when a call returns."""

    cuda_stream = 0

    def __new__(cls, *_: Any, **__: Any) -> Stream:
        """Make a stream of the current device."""
        return super().__new__(cls, device="cuda")


class StreamEvent(torch.Event):
    """A mark in a stream."""

    def __new__(cls, *_: Any, **__: Any) -> StreamEvent:
        """Make an event of the current device."""
        return super().__new__(cls, device="cuda")

    def elapsed_time(self, _: StreamEvent) -> float:
        """Return milliseconds; nothing takes time here."""
        return 0.0


class Graph:
    """A recorded sequence of operations."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._number = -1

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        """Record operations from now on."""
        self._gpu.pools.append(pool)
        self._number = self._gpu.capture()

    def capture_end(self) -> None:
        """Compute operations again."""
        self._gpu.end_capture()

    def replay(self) -> None:
        """Compute what was recorded, into the memory of the capture."""
        self._gpu.replay(self._number)

    def reset(self) -> None:
        """Forget what was recorded, and free the memory of its results."""
        self._gpu.forget(self._number)

    def __del__(self) -> None:
        if self._number >= 0:
            self.reset()


@contextmanager
def capturing(graph: Graph, pool: Any = None, **_: Any) -> Iterator[None]:
    """Capture the operations of the block, as torch.cuda.graph does."""
    graph.capture_begin(pool)
    try:
        yield
    finally:
        graph.capture_end()
