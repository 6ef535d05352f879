"""AdamW and gradient norms on a CPU and in operations of torch; adamw_gpu.py is the third way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlhf.engine.masters import Split
from rlhf.kernels.adamw import AdamwKernel, AdamwScalars, SplitState

# Weights per torch update. On a CPU they fit into a cache, with gradients and moments. On a GPU an
# update takes some 20 launches, whatever its size, and 0.1 GiB.
CHUNK = 2**18
GPU_CHUNK = 2**22


class AdamwWay(Protocol):
    """A way to compute AdamW; each list has one entry for each parameter."""

    def squares(self, gradients: Sequence[Tensor | None]) -> Tensor | float:
        """Return the sum of the squares of bf16 gradients; None counts as zeros."""
        ...

    def step(
        self,
        states: Sequence[SplitState],
        gradients: Sequence[Tensor | None],
        numbers: Sequence[AdamwScalars],
    ) -> None:
        """Take one AdamW step on bf16 gradients, in place; nothing changes without a gradient."""
        ...


class CompiledWay:
    """The C kernel, on a CPU."""

    def __init__(self, kernel: AdamwKernel) -> None:
        self._kernel = kernel

    def squares(self, gradients: Sequence[Tensor | None]) -> float:
        """Return the sum of the squares of the gradients."""
        return sum(self._kernel.squares(each) for each in gradients if each is not None)

    def step(
        self,
        states: Sequence[SplitState],
        gradients: Sequence[Tensor | None],
        numbers: Sequence[AdamwScalars],
    ) -> None:
        """Take one AdamW step, in place."""
        for split, gradient, scalars in zip(states, gradients, numbers, strict=True):
            if gradient is not None:
                self._kernel.step(split, gradient, scalars)


class TorchWay:
    """Operations of torch, on any device."""

    def squares(self, gradients: Sequence[Tensor | None]) -> Tensor | float:
        """Return the sum of the squares of the gradients."""
        present = [each for each in gradients if each is not None]
        if not present:
            return 0.0
        norms = torch._foreach_norm(present, 2, dtype=torch.float32)
        return torch.stack(norms).double().square().sum()

    def step(
        self,
        states: Sequence[SplitState],
        gradients: Sequence[Tensor | None],
        numbers: Sequence[AdamwScalars],
    ) -> None:
        """Take one AdamW step, in place."""
        for split, gradient, scalars in zip(states, gradients, numbers, strict=True):
            if gradient is not None:
                _step_in_chunks(split, gradient.reshape(-1), scalars)


def _step_in_chunks(state: SplitState, gradient: Tensor, numbers: AdamwScalars) -> None:
    """Take the kernels' step some weights at a time."""
    chunk = CHUNK if gradient.device.type == "cpu" else GPU_CHUNK
    for part in _parts(gradient.numel(), chunk):
        split = Split(state.high[part], state.low[part])
        weights, spare = torch.empty(2, split.low.numel(), device=gradient.device)
        split.join(weights, spare)
        scaled = gradient[part].float().mul_(numbers.scale)
        first, second = state.first[part].float(), state.second[part].float()  # no copy if fp32
        first.lerp_(scaled, 1.0 - numbers.beta1)
        second.mul_(numbers.beta2).addcmul_(scaled, scaled, value=1.0 - numbers.beta2)
        root = (second / numbers.correction2).sqrt_().add_(numbers.eps)
        weights.mul_(1.0 - numbers.lr * numbers.decay)
        weights.addcdiv_(first, root, value=-numbers.lr / numbers.correction1)
        state.first[part].copy_(first)
        state.second[part].copy_(second)
        split.split(weights)


def _parts(size: int, chunk: int) -> Iterator[slice]:
    for start in range(0, size, chunk):
        yield slice(start, start + chunk)
