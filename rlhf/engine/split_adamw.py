"""AdamW for bf16 weights with exact fp32 masters: 4 bytes per weight, plus 8 or 4 for moments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.engine.masters import AdamwScalars, AdamwUpdate, Masters, Split, SplitState
from rlhf.engine.training_state import AdamMoments
from rlhf.options import kernels_for

# Number of weights to update at once. On a CPU they fit its cache, with gradients and moments.
# On a GPU each update of GPU_CHUNK weights needs about 20 kernel launches and 0.1 GiB.
CHUNK = 2**18
GPU_CHUNK = 2**22


class SplitAdamW:
    """AdamW (https://arxiv.org/abs/1711.05101), with the same update as torch.optim.AdamW.

    The model computes with the upper 16 bits of each fp32 weight, rounded; the optimizer keeps the
    lower bits. With ``moments`` in bf16 both moments are rounded after each step; this is meant for
    beta2 up to about 0.99, above which a step changes the second moment by less than the rounding.
    Each parameter becomes a bf16 tensor: its tensor in ``places`` or, without places, a new tensor.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float,
        moments: torch.dtype,
        places: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self.param_groups = groups
        self._betas = betas
        self._eps = eps
        self._steps = 0
        trained = [parameter for group in groups for parameter in group["params"]]
        halves = places or {
            p: torch.empty(p.shape, dtype=torch.bfloat16, device=p.device) for p in trained
        }
        self._parameters = trained
        self._states = [_split_parameter(p, halves[p], moments) for p in trained]
        self._way = _select_adamw(trained, moments)

    @property
    def masters(self) -> Masters:
        """Return the fp32 weights, split into bf16 weights and the lower bits."""
        return Masters([Split(each.high, each.low) for each in self._states], lambda: None)

    @property
    def moments(self) -> list[AdamMoments]:
        """Return the moments of each parameter, in the order of the masters."""
        return [{"first": each.first, "second": each.second} for each in self._states]

    def state_dict(self) -> dict[str, Any]:
        """Return the step counter, for a checkpoint."""
        return {"adamw_steps": [self._steps]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state`` that ``state_dict`` returned."""
        self._steps = int(max(state["adamw_steps"]))

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Return the Euclidean norm of all gradients, summed in fp32 or better."""
        return math.sqrt(self._way.sum_of_squares(self._gradients()))

    @torch.no_grad()
    def step(self, *, scale: float = 1.0) -> None:
        """Take a step with gradients times ``scale``; skip parameters without a gradient."""
        self._steps += 1
        beta1, beta2 = self._betas
        numbers = [
            AdamwScalars(
                scale=scale,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=self._eps,
                decay=group["weight_decay"],
                correction1=1.0 - beta1**self._steps,
                correction2=1.0 - beta2**self._steps,
            )
            for group in self.param_groups
            for _ in group["params"]
        ]
        self._way.step(self._states, self._gradients(), numbers)

    def _gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def zero_grad(self) -> None:
        """Set the gradients to None instead of 0; the next backward pass allocates new ones."""
        for parameter in self._parameters:
            parameter.grad = None


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
        numbers: Sequence[AdamwScalars],
    ) -> None:
        """Take one AdamW step on bf16 gradients, in place; skip states without a gradient."""
        for split, gradient, scalars in zip(states, gradients, numbers, strict=True):
            if gradient is not None:
                _step_in_chunks(split, gradient.reshape(-1), scalars)


def _step_in_chunks(state: SplitState, gradient: Tensor, numbers: AdamwScalars) -> None:
    """Update one parameter by an AdamW step, one chunk of its weights at a time."""
    chunk = CHUNK if gradient.device.type == "cpu" else GPU_CHUNK
    for start in range(0, gradient.numel(), chunk):
        part = slice(start, start + chunk)
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


def _select_adamw(parameters: Sequence[nn.Parameter], moments: torch.dtype) -> AdamwUpdate:
    """Return the AdamW kernel of this device or, without a kernel, AdamW by torch operations."""
    device, sizes = parameters[0].device, [parameter.numel() for parameter in parameters]
    return kernels_for(device.type).adamw_kernel(sizes, device, moments) or TorchAdamw()


def _split_parameter(parameter: nn.Parameter, half: Tensor, moments: torch.dtype) -> SplitState:
    """Split ``parameter`` into a new state; its data becomes ``half``, the upper 16 bits."""
    # Copy the weights, since split() overwrites bits of its argument.
    weights = parameter.detach().to(half.device, torch.float32, copy=True).flatten()
    parameter.data = half
    low = torch.empty(weights.shape, dtype=torch.int16, device=weights.device)
    first, second = (torch.zeros_like(weights, dtype=moments) for _ in range(2))
    state = SplitState(half.view(-1), low, first, second)
    Split(state.high, low).split(weights)
    return state
