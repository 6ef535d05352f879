"""AdamW for bf16 weights with exact fp32 masters, in 4 + 8 (or 4 + 4) bytes per weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf.engine.masters import Masters, Split

CHUNK = 2**18  # weights updated at once: all that belongs to them fits into a core's cache


class _Piece(NamedTuple):
    """A run of one parameter's weights within a chunk."""

    parameter: nn.Parameter
    of_parameter: slice
    of_chunk: slice


class _Chunk(NamedTuple):
    pieces: list[_Piece]
    split: Split
    first: Tensor  # AdamW's moments
    second: Tensor


class LeanAdamW:
    """Decoupled weight decay Adam (https://arxiv.org/abs/1711.05101), as torch.optim.AdamW has it.

    The model computes with the upper 16 bits of each fp32 weight, the optimiser keeps the lower
    ones. Weights, remainders and moments of a group lie one behind the other, and are updated chunk
    by chunk. With ``moments`` in bf16 both moments are rounded after each step; they are meant for
    beta2 up to about 0.99, beyond which a step changes the second by less than the rounding.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float,
        moments: torch.dtype,
    ) -> None:
        self.param_groups = groups
        self._betas = betas
        self._eps = eps
        self._steps = 0
        self._chunks = [_chunks(group["params"], moments) for group in groups]
        self._device = groups[0]["params"][0].device
        self._scratch = torch.empty(4, CHUNK, dtype=torch.float32, device=self._device)

    @property
    def masters(self) -> Masters:
        """The fp32 weights."""
        splits = [chunk.split for chunks in self._chunks for chunk in chunks]
        return Masters(splits, lambda: None)

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Euclidean norm of all gradients, summed in fp32."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for chunk in (chunk for chunks in self._chunks for chunk in chunks):
            gradient = self._gradient(chunk)
            squares += torch.dot(gradient, gradient)
        return float(squares.sqrt())

    @torch.no_grad()
    def step(self, *, scale: float = 1.0) -> None:
        """One step on the gradients times ``scale``."""
        self._steps += 1
        steps = torch.tensor(float(self._steps), device=self._device)
        for group, chunks in zip(self.param_groups, self._chunks, strict=True):
            for chunk in chunks:
                size = len(chunk.split.low)
                _, weights, first, second = self._scratch[:, :size]
                chunk.split.join(weights, first)
                gradient = self._gradient(chunk)
                if scale != 1.0:
                    gradient.mul_(scale)
                is_half = chunk.first.dtype is not torch.float32
                if is_half:
                    first.copy_(chunk.first)
                    second.copy_(chunk.second)
                torch._fused_adamw_(
                    [weights],
                    [gradient],
                    [first if is_half else chunk.first],
                    [second if is_half else chunk.second],
                    [],
                    [steps],
                    lr=group["lr"],
                    beta1=self._betas[0],
                    beta2=self._betas[1],
                    weight_decay=group["weight_decay"],
                    eps=self._eps,
                    amsgrad=False,
                    maximize=False,
                )
                if is_half:
                    chunk.first.copy_(first)
                    chunk.second.copy_(second)
                chunk.split.split(weights)

    def zero_grad(self) -> None:
        """Forget the gradients; the next ones take new memory, so nothing is filled with zeros."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _gradient(self, chunk: _Chunk) -> Tensor:
        """The gradient of a chunk in fp32, in memory that the next call uses again."""
        gradient = self._scratch[0, : len(chunk.split.low)]
        for parameter, of_parameter, of_chunk in chunk.pieces:
            if parameter.grad is None:
                gradient[of_chunk].zero_()
            else:
                gradient[of_chunk].copy_(parameter.grad.view(-1)[of_parameter])
        return gradient


def _chunks(parameters: list[nn.Parameter], moments: torch.dtype) -> list[_Chunk]:
    """Lay ``parameters`` out in one flat memory, and cut it into chunks."""
    total = sum(parameter.numel() for parameter in parameters)
    device = parameters[0].device
    low = torch.empty(total, dtype=torch.int16, device=device)
    high = torch.empty(total, dtype=torch.bfloat16, device=device)
    start = 0
    for parameter in parameters:
        end = start + parameter.numel()
        # A copy: split() spoils what it is given.
        Split(high[start:end], low[start:end]).split(parameter.detach().float().flatten().clone())
        parameter.data = high[start:end].view(parameter.shape)
        start = end
    first, second = torch.zeros(2, total, dtype=moments, device=device)
    return [
        _Chunk(
            list(_pieces(parameters, begin, min(begin + CHUNK, total))),
            *(Split(high[begin : begin + CHUNK], low[begin : begin + CHUNK]),),
            *(moment[begin : begin + CHUNK] for moment in (first, second)),
        )
        for begin in range(0, total, CHUNK)
    ]


def _pieces(parameters: list[nn.Parameter], begin: int, end: int) -> Iterator[_Piece]:
    """The parts of ``parameters``, laid one behind the other, between ``begin`` and ``end``."""
    start = 0
    for parameter in parameters:
        first, last = max(start, begin), min(start + parameter.numel(), end)
        if first < last:
            own, within = slice(first - start, last - start), slice(first - begin, last - begin)
            yield _Piece(parameter, own, within)
        start += parameter.numel()
