"""AdamW for bf16 weights with exact fp32 masters, in 4 + 8 (or 4 + 4) bytes per weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf.engine.masters import Masters, Split
from rlhf.engine.training_state import Moments
from rlhf.kernels.adamw import AdamwScalars, SplitState, adamw_kernel

# Weights per torch update. On a CPU they fit into a cache, with gradients and moments. On a GPU an
# update takes some 20 launches, whatever its size, and 0.1 GiB.
CHUNK = 2**18
GPU_CHUNK = 2**22


class _State(NamedTuple):
    """A parameter with its masters and moments, flattened."""

    parameter: nn.Parameter
    low: Tensor
    first: Tensor
    second: Tensor

    @property
    def high(self) -> Tensor:
        """Return the bf16 weights that the model computes with, flattened."""
        return self.parameter.data.view(-1)


class SplitAdamW:
    """AdamW (https://arxiv.org/abs/1711.05101), with the same update as torch.optim.AdamW.

    The model computes with the upper 16 bits of each fp32 weight, rounded; the optimizer keeps the
    lower bits. With ``moments`` in bf16 both moments are rounded after each step; this is meant for
    beta2 up to about 0.99, above which a step changes the second moment by less than the rounding.
    Parameters are cast to bf16, in place.
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
        self._states = [[_state(p, moments) for p in group["params"]] for group in groups]
        is_cpu = groups[0]["params"][0].device.type == "cpu"
        self._kernel = adamw_kernel() if is_cpu else None

    @property
    def masters(self) -> Masters:
        """Return the fp32 weights."""
        shards = [Split(state.high, state.low) for state in self._flat_states()]
        return Masters(shards, lambda: None)

    @property
    def moments(self) -> list[Moments]:
        """Return the moments of each parameter, in the order of the masters."""
        return [{"first": each.first, "second": each.second} for each in self._flat_states()]

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the state, for a checkpoint."""
        return {"adamw_steps": [self._steps]}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Continue from the ``numbers`` of a checkpoint."""
        self._steps = int(max(numbers["adamw_steps"]))

    def _flat_states(self) -> list[_State]:
        return [state for states in self._states for state in states]

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Return the Euclidean norm of all gradients, summed in fp32 or better."""
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        present = [gradient for gradient in gradients if gradient is not None]
        if self._kernel is not None:
            return float(sum(map(self._kernel.squares, present)) ** 0.5)
        norms = torch._foreach_norm(present, 2, dtype=torch.float32) if present else ()
        return float(torch.nn.utils.get_total_norm(norms))

    @torch.no_grad()
    def step(self, *, scale: float = 1.0) -> None:
        """Step on the gradients times ``scale``; parameters without a gradient do not change."""
        self._steps += 1
        beta1, beta2 = self._betas
        for group, states in zip(self.param_groups, self._states, strict=True):
            numbers = AdamwScalars(
                scale=scale,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=self._eps,
                decay=group["weight_decay"],
                correction1=1.0 - beta1**self._steps,
                correction2=1.0 - beta2**self._steps,
            )
            for state in states:
                gradient = state.parameter.grad
                if gradient is not None and self._kernel is not None:
                    split = SplitState(state.high, state.low, state.first, state.second)
                    self._kernel.step(split, gradient, numbers)
                elif gradient is not None:
                    _step_in_chunks(state, gradient.reshape(-1), numbers)

    def zero_grad(self) -> None:
        """Drop the gradients; the next ones take new memory, so nothing is filled with zeros."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _state(parameter: nn.Parameter, moments: torch.dtype) -> _State:
    weights = parameter.detach().float().flatten().clone()  # a copy: split() overwrites bits
    parameter.data = parameter.data.bfloat16().contiguous()
    low = torch.empty(weights.shape, dtype=torch.int16, device=weights.device)
    first, second = (torch.zeros_like(weights, dtype=moments) for _ in range(2))
    state = _State(parameter, low, first, second)
    Split(state.high, low).split(weights)
    return state


def _step_in_chunks(state: _State, gradient: Tensor, numbers: AdamwScalars) -> None:
    """Take the kernel's step with torch operations, some weights at a time."""
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
