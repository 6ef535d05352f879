"""AdamW for bf16 weights with exact fp32 masters: 4 bytes per weight, plus 8 or 4 for moments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.engine.masters import Masters
from rlhf.engine.training_state import AdamMoments
from rlhf.kernels import kernels_for
from rlhf.kernels.torch_adamw import (
    AdamwScalars,
    AdamwUpdate,
    Split,
    SplitState,
    TorchAdamw,
)


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
        self._update = _select_adamw(trained, moments)

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
        return math.sqrt(self._update.sum_of_squares(self._gradients()))

    @torch.no_grad()
    def step(self, *, scale: float = 1.0) -> None:
        """Take a step with gradients times ``scale``; skip parameters without a gradient."""
        self._steps += 1
        beta1, beta2 = self._betas
        scalars = [
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
        self._update.step(self._states, self._gradients(), scalars)

    def _gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def zero_grad(self) -> None:
        """Set the gradients to None instead of 0; the next backward pass allocates new ones."""
        for parameter in self._parameters:
            parameter.grad = None


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
