"""AdamW on fp32 weights in two 16-bit halves, by torch; kernels compute the same faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Number of weights to update at once. On a CPU they fit its cache, with gradients and moments.
# On a GPU each update of GPU_CHUNK weights needs about 20 kernel launches and 0.1 GiB.
CHUNK = 2**18
GPU_CHUNK = 2**22


class Split(NamedTuple):
    """fp32 weights in two halves: bf16 weights, which the model uses, and the remaining 16 bits.

    As integers, weights = 65536 * high + low, with low from -32768 to 32767: ``high`` is the
    nearest bf16 number, and high and low together are exact. Ties are rounded away from zero,
    because the usual rounding to even would also need a low of +32768.
    """

    high: Tensor  # bf16
    low: Tensor  # int16

    def join(self, out: Tensor, spare: Tensor) -> Tensor:
        """Write the fp32 weights to ``out`` and return ``out``; ``spare`` is fp32 scratch space."""
        out.copy_(self.high)
        low = spare.view(torch.int32)
        out.view(torch.int32).add_(low.copy_(self.low))
        return out

    def split(self, weights: Tensor) -> None:
        """Store fp32 ``weights`` in high and low; the lowest bit of ``weights`` is overwritten."""
        bits = weights.view(torch.int32)
        self.low.copy_(bits)  # conversion to int16 keeps the low bits
        bits.bitwise_or_(1)  # breaks ties: low bits 0x8000 must never round down
        self.high.copy_(weights)


class SplitState(NamedTuple):
    """The fp32 weights of a parameter, split into two halves, and its moments; all contiguous."""

    high: Tensor  # bf16
    low: Tensor  # int16: the fp32 weight has the bits 65536 * high + low
    first: Tensor  # AdamW's first moment; the first and second are both bf16 or both fp32
    second: Tensor


class AdamwScalars(NamedTuple):
    """The scalars of step t of AdamW; the bias corrections are 1 - beta^t."""

    scale: float  # factor by which gradients are multiplied first
    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float  # weight decay
    correction1: float
    correction2: float


class AdamwUpdate(Protocol):
    """An implementation of AdamW's update on fp32 weights that are stored as ``Split``."""

    def step(
        self,
        states: Sequence[SplitState],
        gradients: Sequence[Tensor | None],
        scalars: Sequence[AdamwScalars],
    ) -> None:
        """Take one AdamW step on bf16 gradients, in place; skip states without a gradient."""

    def sum_of_squares(self, gradients: Sequence[Tensor | None]) -> float | Tensor:
        """Return the sum of the squares of bf16 gradients; None counts as zeros."""


def fp32_weights(shard: Tensor | Split) -> Tensor:
    """Return the fp32 weights of ``shard``: a view if it is fp32, otherwise a copy."""
    if isinstance(shard, Split):
        weights = torch.empty_like(shard.high, dtype=torch.float32)
        return shard.join(weights, torch.empty_like(weights))
    return shard.detach().float()


class TorchAdamw:
    """AdamW and gradient norms computed by operations of torch, on any device."""

    def sum_of_squares(self, gradients: Sequence[Tensor | None]) -> Tensor | float:
        """Return the sum of the squares of bf16 gradients; None counts as zeros."""
        present = [each for each in gradients if each is not None]
        if not present:
            return 0.0
        norms = torch._foreach_norm(present, 2, dtype=torch.float32)
        return torch.stack(norms).double().square().sum()

    def step(
        self,
        states: Sequence[SplitState],
        gradients: Sequence[Tensor | None],
        scalars: Sequence[AdamwScalars],
    ) -> None:
        """Take one AdamW step on bf16 gradients, in place; skip states without a gradient."""
        for state, gradient, its_scalars in zip(states, gradients, scalars, strict=True):
            if gradient is not None:
                _step_in_chunks(state, gradient.reshape(-1), its_scalars)


def _step_in_chunks(state: SplitState, gradient: Tensor, scalars: AdamwScalars) -> None:
    """Update one parameter by an AdamW step, one chunk of its weights at a time."""
    chunk = CHUNK if gradient.device.type == "cpu" else GPU_CHUNK
    for start in range(0, gradient.numel(), chunk):
        part = slice(start, start + chunk)
        split = Split(state.high[part], state.low[part])
        weights, spare = torch.empty(2, split.low.numel(), device=gradient.device)
        split.join(weights, spare)
        scaled = gradient[part].float().mul_(scalars.scale)
        first, second = state.first[part].float(), state.second[part].float()  # no copy if fp32
        first.lerp_(scaled, 1.0 - scalars.beta1)
        second.mul_(scalars.beta2).addcmul_(scaled, scaled, value=1.0 - scalars.beta2)
        root = (second / scalars.correction2).sqrt_().add_(scalars.eps)
        weights.mul_(1.0 - scalars.lr * scalars.decay)
        weights.addcdiv_(first, root, value=-scalars.lr / scalars.correction1)
        state.first[part].copy_(first)
        state.second[part].copy_(second)
        split.split(weights)
