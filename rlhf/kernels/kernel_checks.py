"""Compare kernels with torch before a run uses them, as ``hardware.kernels`` chooses.

Each kernel, CUDA graph and joint projection is compared at its first use on a device, in the
precision and the shapes of the run. Torch replaces what does not compile or run, and what differs
by more than a bound: one line gives the reason and the cost, and the phase's result stores it.

rlhf/kernels/checked.py has the comparisons.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import Kernels

logger = logging.getLogger(__name__)

# Largest allowed error, as a share of torch's largest number. An integer must be equal.
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
COSTS: Mapping[str, str] = read_yaml_beside(__file__, "kernel_costs.yaml")

K = TypeVar("K")
Pairs = Iterable[tuple[Tensor, Tensor]]  # results of a kernel, each with the result of torch


@dataclass
class _State:
    """The kernels that this process may use, and the results of their comparisons."""

    choice: Kernels = Kernels.auto
    say: Callable[[str], None] = logger.warning
    replaced: dict[str, str] = field(default_factory=dict)  # kernel -> line
    agreed: set[Hashable] = field(default_factory=set)  # kernels and shapes that were compared


_STATE = _State()


def choose_kernels(choice: Kernels, say: Callable[[str], None] | None = None) -> None:
    """Use kernels in this process as ``hardware.kernels`` says; ``say`` prints replacements."""
    _STATE.choice = choice
    _STATE.say = say or _STATE.say


def are_off() -> bool:
    """Return True if torch computes everything."""
    return _STATE.choice is Kernels.off


def replaced_kernels() -> list[str]:
    """Return a line for each kernel that torch replaces in this process."""
    return list(_STATE.replaced.values())


def note_replaced(name: str, line: str) -> None:
    """Keep the ``line`` about a kernel that torch replaces, for the results of phases."""
    _STATE.replaced[name] = line


def use_if_equal(
    name: str,
    device: str,
    load: Callable[[], K | None],
    compare: Callable[[K], Pairs],
    *,
    shape: Hashable = None,
    bound: float | None = None,
) -> K | None:
    """Return the kernel that ``load`` returns, or None if torch must compute instead.

    ``compare`` returns results of the kernel beside torch's. They may differ by ``bound`` times
    torch's largest number; if ``bound`` is None, ``BOUNDS`` has the number for their precision. The
    kernel is compared once for each ``shape``, or each time if ``shape`` is None, but not on a CPU
    with kernels=auto. After a failure torch replaces all kernels of this name.
    """
    if are_off() or name in _STATE.replaced:
        return None
    if _STATE.choice is Kernels.auto and device == "cpu":
        return load()
    try:
        kernel = load()
        if kernel is None or (shape is not None and (name, shape) in _STATE.agreed):
            return kernel
        gpus = [] if device == "cpu" else [torch.cuda.current_device()]
        with torch.random.fork_rng(gpus), torch.no_grad(), torch.autocast(device, enabled=False):
            torch.manual_seed(0)
            reason = _describe_difference(compare(kernel), bound)
    except Exception as error:  # compilers, Triton and drivers raise errors of many classes
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if reason is None:
        _STATE.agreed.add((name, shape))
        return kernel
    line = f"kernels: torch replaces {name} ({reason}): {COSTS[name]}"
    note_replaced(name, line)
    _STATE.say(line)
    return None


def _describe_difference(pairs: Pairs, bound: float | None) -> str | None:
    for result, expected in pairs:
        allowed = BOUNDS.get(result.dtype, 0.0) if bound is None else bound
        largest = expected.double().abs().max().clamp(min=1e-30)
        error = float((result.double() - expected.double()).abs().max() / largest)
        if not error <= allowed:  # NaN is an error too
            return f"its error is {error:.1e} of the largest number, above the bound {allowed:.0e}"
    return None
