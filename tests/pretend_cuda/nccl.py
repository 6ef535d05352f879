"""Collectives of pretended GPUs: gloo computes them, and refuses what NCCL refuses.

Ranks that call different collectives make NCCL hang, or add numbers that do not belong together.
Here the ranks of a group first exchange what they are about to call, with the line that calls it,
through the store by which they have met; where that differs, all of them end with both lines.
"""

import atexit
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup, ReduceOp, Store, distributed_c10d

from tests.pretend_cuda.environment import Set
from tests.pretend_cuda.gpu import Gpu, call_site

# Collectives, and the argument whose type and shape must be the same on all ranks. Lists may hold
# tensors of different sizes, and so may objects.
COLLECTIVES = {
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "all_gather": None,
    "all_gather_into_tensor": "input_tensor",
    "_all_gather_base": "input_tensor",
    "all_to_all": None,
    "all_to_all_single": None,
    "broadcast": "tensor",
    "gather": "tensor",
    "reduce": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "input",
    "_reduce_scatter_base": "input",
    "scatter": "tensor",
    "barrier": None,
    "all_gather_object": None,
    "broadcast_object_list": None,
    "gather_object": None,
    "scatter_object_list": None,
}
BETWEEN_TWO = ("send", "recv", "isend", "irecv")  # in any order with other pairs
# Arguments of which one has the numbers of all ranks, and the other those of one rank.
WHOLE_AND_PART = {
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "_all_gather_base": ("output_tensor", "input_tensor"),
    "reduce_scatter_tensor": ("input", "output"),
    "_reduce_scatter_base": ("input", "output"),
}
FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
DTYPES = FP8 | {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
DTYPES |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.complex64, torch.complex128}
BITWISE = {ReduceOp.BAND: "BAND", ReduceOp.BOR: "BOR", ReduceOp.BXOR: "BXOR"}
END = "the end of the rank, whose last call was"
PATIENCE = timedelta(seconds=150)  # what one rank of a test may compute while others wait


def replace_collectives(gpu: Gpu, set_: Set) -> None:
    """Let gloo do the collectives of NCCL, on the same memory, under the rules of NCCL."""
    groups = Groups(gpu)
    for module in (torch.distributed, distributed_c10d):
        for name in ("init_process_group", "new_group"):
            set_(module, name, groups.starting(getattr(module, name)))
        for name in (*COLLECTIVES, *BETWEEN_TWO):
            set_(module, name, groups.checking(getattr(module, name)))
        set_(module, "monitored_barrier", _not_of_nccl)
        set_(module, "is_nccl_available", lambda: True)
    destroy = torch.distributed.destroy_process_group
    set_(torch.distributed, "destroy_process_group", groups.ending(destroy))
    atexit.register(groups.end)


class Groups:
    """The groups of NCCL of this process, and the number of collectives of each so far."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._device: int | None = None  # the GPU that the group of all ranks is bound to
        self._orders: dict[str, Order] = {}  # by the group's name
        self._inner = threading.local()  # a collective that calls others

    def starting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return init_process_group or new_group that gives gloo the work of NCCL."""

        @wraps(function)
        def started(*args: Any, **how: Any) -> Any:
            given = inspect.signature(function).bind(*args, **how).arguments
            is_first = function.__name__ == "init_process_group"
            backend = given.get("backend") or ("nccl" if is_first or self._orders else None)
            if backend != "nccl":
                return function(*args, **how)
            self._gpu.environment.read("NCCL")
            bound = given.pop("device_id", None)
            if bound is not None:
                self._device = torch.device(bound).index
            given["backend"] = "cpu:gloo,cuda:gloo"
            group = function(**given)
            self._add(torch.distributed.group.WORLD if is_first else group)
            return group

        return started

    def _add(self, group: Any) -> None:
        if not isinstance(group, ProcessGroup):
            return  # this rank is no member
        ranks, name = torch.distributed.get_process_group_ranks(group), group.group_name
        store = distributed_c10d._get_default_store().clone() if len(ranks) > 1 else None
        self._orders[name] = Order(name, store, torch.distributed.get_rank(), ranks)

    def checking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collective that refuses what NCCL refuses."""
        name = function.__name__

        @wraps(function)
        def checked(*args: Any, **how: Any) -> Any:
            given = signature(function).bind(*args, **how).arguments
            group = given.get("group") or torch.distributed.group.WORLD
            order = self._orders.get(getattr(group, "group_name", ""))
            if order is None or getattr(self._inner, "is_called", False):
                return function(*args, **how)
            if "object" not in name:
                self._refuse(name, given, len(order.ranks))
            if name in COLLECTIVES:
                order.agree(describe(name, given), call_site())
            with self._calling_others():
                return function(*args, **how)

        return checked

    @contextmanager
    def _calling_others(self) -> Iterator[None]:
        self._inner.is_called = True
        try:
            yield
        finally:
            self._inner.is_called = False

    def _refuse(self, name: str, given: Mapping[str, Any], size: int) -> None:
        """Raise RuntimeError for what NCCL refuses; most messages are torch's."""
        found = list(tensors_of(list(given.values())))
        for tensor in found:
            refuse_tensor(tensor, self._device)
        dtypes = {tensor.dtype for tensor in found}
        if len(dtypes) > 1:
            raise RuntimeError(f"Tensors must have identical type, and have {dtypes}")
        if "reduce" in name:
            self._refuse_reduction(given.get("op", ReduceOp.SUM), dtypes)
        whole, part = (given.get(key) for key in WHOLE_AND_PART.get(name, ("", "")))
        if whole is not None and whole.numel() != size * part.numel():
            raise RuntimeError(
                f"{name} of {size} ranks: {whole.numel()} numbers in all, {part.numel()} of one"
            )

    def _refuse_reduction(self, op: Any, dtypes: set[torch.dtype]) -> None:
        for bitwise, text in BITWISE.items():
            if op == bitwise:
                raise RuntimeError(f"Cannot use ReduceOp.{text} with NCCL")
        if torch.bool in dtypes and op in (ReduceOp.SUM, ReduceOp.AVG):
            raise RuntimeError("NCCL does not add booleans: their sum is an OR")
        if dtypes & FP8 and self._gpu.card.capability < (9, 0):
            raise RuntimeError("FP8 reduction support begins with sm90 capable devices")

    def ending(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return destroy_process_group that the other ranks hear of."""

        @wraps(function)
        def ended(*args: Any, **how: Any) -> None:
            self.end()
            function(*args, **how)

        return ended

    def end(self) -> None:
        """Let ranks that wait for this one know that it calls nothing more."""
        for order in self._orders.values():
            order.end()
        self._orders.clear()


class Order:
    """The collectives of a group in the order in which this rank calls them."""

    def __init__(
        self,
        name: str,
        store: Store | None,
        rank: int,
        ranks: list[int],
        patience: timedelta = PATIENCE,
    ) -> None:
        self.ranks = ranks
        self._name, self._rank = name, rank
        self._store = store
        self._number = 0
        self._place = "no line"
        self._ended: dict[int, tuple[str, str]] = {}
        if store is not None:
            store.set_timeout(patience)
            self._put(0, "none", self._place)

    def agree(self, call: str, place: str) -> None:
        """Raise RuntimeError, on all ranks, unless all ranks of the group call the same.

        Rank by rank the message has the call and its line.
        """
        if self._store is None:
            return
        self._number += 1
        self._place = place
        self._put(self._number, call, place)
        known = self._ended | {self._rank: (call, place)}
        calls = {rank: known.get(rank) or self._get(rank) for rank in self.ranks}
        if len({call for call, _ in calls.values()}) > 1:
            rows = [f"    rank {rank}: {call} at {place}" for rank, (call, place) in calls.items()]
            raise RuntimeError(
                f"The ranks differ in collective {self._number} of group {self._name}:\n"
                + "\n".join(rows)
            )

    def end(self) -> None:
        """Tell ranks that wait for another collective that this one has ended."""
        if self._store is not None:
            with suppress(RuntimeError):  # the store's process has ended before
                self._put(self._number + 1, END, self._place)

    def _put(self, number: int, call: str, place: str) -> None:
        assert self._store is not None
        text = json.dumps([call, place])
        keys = [f"{self._name}/{self._rank}/{number}", f"last/{self._rank}"]
        self._store.multi_set(keys, [text, text])

    def _get(self, rank: int) -> tuple[str, str]:
        """Return another rank's call; if it does not come, where the rank has been last."""
        assert self._store is not None
        try:
            call, place = json.loads(self._store.get(f"{self._name}/{rank}/{self._number}"))
        except torch.distributed.DistStoreError:
            call, place = json.loads(self._store.get(f"last/{rank}"))
            call = f"still not here; its last call was {call}"
        if call == END:
            self._ended[rank] = (call, place)
        return call, place


def refuse_tensor(tensor: torch.Tensor, bound: int | None) -> None:
    """Raise RuntimeError unless NCCL, bound to a GPU, can send the tensor."""
    if not tensor.is_cuda:
        raise RuntimeError(f"No backend type associated with device type {tensor.device}")
    if bound not in (None, tensor.device.index):
        raise RuntimeError(
            f"Tensor found on device {tensor.device} but backend constrained to cuda:{bound}"
        )
    if tensor.is_sparse:
        raise RuntimeError("Tensors must be CUDA and dense")
    if not tensor.is_contiguous():
        raise RuntimeError(f"Tensors must be contiguous, and one has strides {tensor.stride()}")
    if tensor.dtype not in DTYPES:
        raise RuntimeError(
            f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}"
        )


@cache
def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the arguments of a function."""
    return inspect.signature(function)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in lists of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def describe(name: str, given: Mapping[str, Any]) -> str:
    """Return what must be the same on all ranks, such as ``all_reduce(float32 [2, 3], SUM)``."""
    words = []
    for tensor in tensors_of(given.get(COLLECTIVES[name] or "")):
        words.append(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
    if "op" in given:
        words.append(str(given["op"]))
    words += [f"{key}={given[key]}" for key in ("src", "dst") if given.get(key) is not None]
    return f"{name}({', '.join(words)})"


def _not_of_nccl(*_: Any, **__: Any) -> None:
    raise RuntimeError("monitored_barrier is only implemented for GLOO backend")
