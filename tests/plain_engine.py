"""Engines without DeepSpeed, for tests of what runs on one: the module as it is."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.base.types import Engine, StepReport
from rlhf.run.model_folder import tensors_to_save


def whole_state(engine: Engine, of: nn.Module | None = None) -> dict[str, Tensor]:
    """Copies of all that would be saved of a module of the engine; every rank must call it."""
    tensors = tensors_to_save(engine.module if of is None else of)
    return {name: tensor.clone() for name, tensor in engine.stream_state(tensors)}


class PlainEngine:
    """Runs a module in its own precision; an ``Engine`` that cannot be trained."""

    is_sharded = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval()
        self.lr_scale = 1.0
        self.follower: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        raise NotImplementedError

    def has_overflow(self) -> bool:
        raise NotImplementedError

    def step(self, *, discard: bool = False) -> StepReport:
        raise NotImplementedError

    def gather_parameters(self, module: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def stream_state(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, tensor.detach()) for name, tensor in state.items())

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                yield self.module
        finally:
            self.module.train(was_training)


class TrainingEngine(PlainEngine):
    """Takes plain gradient steps of length ``lr``, each of ``accumulation`` micro-batches.

    It keeps the gradients of every step: with a ``lr`` of 0 they are those of the weights that the
    test knows.
    """

    def __init__(
        self, module: nn.Module, *, accumulation: int, lr: float = 0.0, overflows: bool = False
    ) -> None:
        super().__init__(module)
        self.module.train()
        self.accumulation, self.lr, self.overflows = accumulation, lr, overflows
        self.micro_steps = self.waiting = 0
        self.gradients: list[dict[str, Tensor]] = []
        self.discarded: list[bool] = []

    def backward(self, loss: Tensor) -> None:
        self.micro_steps += 1
        self.waiting += 1
        loss.backward()

    def has_overflow(self) -> bool:
        self.require_all_micro_batches()
        return self.overflows

    def step(self, *, discard: bool = False) -> StepReport:
        self.require_all_micro_batches()
        self.waiting = 0
        trained = {n: p for n, p in self.module.named_parameters() if p.grad is not None}
        self.gradients.append({name: p.grad.clone() for name, p in trained.items()})
        self.discarded.append(discard)
        is_skipped = discard or self.overflows
        with torch.no_grad():
            for parameter in trained.values():
                length = 0.0 if is_skipped else self.lr * self.lr_scale
                parameter.sub_(parameter.grad, alpha=length)
        self.module.zero_grad()
        return StepReport(0.5 * self.lr_scale, 2.0, is_skipped=is_skipped)

    def require_all_micro_batches(self) -> None:
        assert self.waiting == self.accumulation, "a step without all of its micro-batches"
