"""Base class of the engines: evaluating, gathering and averaging the weights of a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from rlhf.engine.masters import MovingAverage
from rlhf.engine.training_state import TrainingState


class BaseEngine:
    """A module with its precision and the moving average of its weights."""

    module: nn.Module
    _average: MovingAverage | None = None

    def __init__(self, *, casts_to_bf16: bool, device: torch.device) -> None:
        self._casts_to_bf16 = casts_to_bf16
        self._device = device
        self.lr_scale = 1.0

    @property
    def training_state(self) -> TrainingState:
        """Return the tensors that training changes."""
        raise NotImplementedError

    def weight_digests(self) -> dict[str, int]:
        """Return a digest of the fp32 weights of each trained parameter."""
        return self.training_state.weight_digests()

    def swap_in_average(self) -> AbstractContextManager[None]:
        """Swap in the moving average of the weights; every rank must enter and leave."""
        assert self._average is not None, "this engine keeps no average: ema_beta is 0"
        return self._average.swap_in()

    def gather_parameters(self, of: nn.Module) -> AbstractContextManager[None]:
        """Gather all parameters of ``of`` on every rank; every rank must enter and leave."""
        return self._gather(list(of.parameters()))

    def stream_state(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield each name and whole tensor of ``state``, one at a time; clone a tensor to keep it.

        Every rank must iterate over all of them.
        """
        for name, tensor in state.items():
            with self._gather([tensor]):
                yield name, tensor.detach()

    def _gather(self, tensors: list[Tensor]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Gather ``tensors``, which may be sharded, on every rank."""
        return nullcontext()

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the module without dropout and gradients; restore its mode on exit."""
        was_training = self.module.training
        self._set_train_mode(mode=False)
        try:
            with torch.no_grad(), self._autocast():
                yield self.module
        finally:
            self._set_train_mode(mode=was_training)

    def _set_train_mode(self, *, mode: bool) -> None:
        self.module.train(mode)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._casts_to_bf16)
