"""The nouns of the project and the seams between its packages.

Shapes, here and everywhere: B = sequences, P = prompt tokens (left-padded), T = response tokens
(right-padded), S = P + T tokens of whole sequences, V = vocabulary. A ``keep_*`` mask is True where
a token counts; an ``attend_*`` mask is True where a token may be attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rlhf.metrics import Maximum, Metrics


@dataclass(frozen=True)
class Ranks:
    """This process's place among all, and the few collectives that the phases need."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum of ``tensor`` over all ranks, on every rank."""
        return self._all_reduce(tensor, torch.distributed.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum of ``tensor`` over all ranks, on every rank."""
        return self._all_reduce(tensor, torch.distributed.ReduceOp.MAX)

    def _all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        if self.size == 1:
            return tensor
        reduced = tensor.detach().clone()
        torch.distributed.all_reduce(reduced, op=op)
        return reduced

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            torch.distributed.barrier()

    def reduce_metrics(self, metrics: Metrics) -> Metrics:
        """The metrics of all ranks together: two collectives, whatever their number."""
        if self.size == 1 or not metrics:
            return metrics
        is_max = {name: isinstance(metric, Maximum) for name, metric in metrics.items()}
        parts = {n: [getattr(m, f.name) for f in fields(m)] for n, m in metrics.items()}
        sums = self.sum(torch.stack([t for n, ts in parts.items() if not is_max[n] for t in ts]))
        peaks = [t for n, ts in parts.items() if is_max[n] for t in ts]
        maxima = self.max(torch.stack(peaks)) if peaks else torch.empty(0)
        queues = {False: iter(sums.unbind()), True: iter(maxima.unbind())}
        return {
            name: type(metric)(*(next(queues[is_max[name]]) for _ in fields(metric)))
            for name, metric in metrics.items()
        }


class SequenceBatch(NamedTuple):
    """Whole sequences, right-padded; ``keep`` marks the tokens that the loss is about."""

    ids_BS: Tensor
    attend_BS: Tensor
    keep_BS: Tensor


class PreferenceBatch(NamedTuple):
    """Pairs of sequences with a common prompt; row i of both belongs to pair i."""

    chosen: SequenceBatch
    rejected: SequenceBatch

    def both(self) -> SequenceBatch:
        """All chosen sequences, then all rejected ones, for one pass over both."""
        return SequenceBatch(*map(torch.cat, zip(self.chosen, self.rejected, strict=True)))


class PromptBatch(NamedTuple):
    """Prompts to answer: left-padded ids and the text they came from.

    ``draws_BT`` holds one uniform number per response token to be sampled, so that a response
    depends on its own row alone, not on its neighbours or on the number of ranks.
    """

    ids_BP: Tensor
    attend_BP: Tensor
    draws_BT: Tensor
    texts: list[str]


class Responses(NamedTuple):
    """Sampled responses, right-padded to T; the end token, where there is one, is kept."""

    ids_BT: Tensor
    keep_BT: Tensor
    ended_B: Tensor
    logprobs_BT: Tensor | None = None  # as they were sampled, where the backend measures them


class Rollout(NamedTuple):
    """Responses with all that PPO needs to learn from them, as it was when they were sampled."""

    prompts: PromptBatch
    responses: Responses
    logprobs_BT: Tensor
    reference_logprobs_BT: Tensor
    values_BT: Tensor
    scores_B: Tensor


Batch = TypeVar("Batch", bound=tuple[Any, ...])


def take_rows(batch: Batch, rows: list[int]) -> Batch:
    """The same kind of batch (a named tuple) with these rows alone, in this order."""
    taken: list[Any] = []
    for part in batch:
        if isinstance(part, tuple):
            taken.append(take_rows(part, rows))
        elif isinstance(part, list):
            taken.append([part[row] for row in rows])
        else:
            taken.append(None if part is None else part[rows])
    return type(batch)(*taken)


class StepReport(NamedTuple):
    """What one optimiser step did."""

    learning_rate: float
    grad_norm: float
    is_skipped: bool


class Model(Protocol):
    """A model under its parallelism, to be run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass."""

    def evaluating(self) -> AbstractContextManager[nn.Module]:
        """The module without dropout and gradients, for as long as the context lasts."""


class Engine(Model, Protocol):
    """A model that can be trained, and whose weights can be read."""

    module: nn.Module
    is_sharded: bool
    lr_scale: float  # multiplies the schedule, from the next step on

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` to that of the step so far, on all ranks."""

    @property
    def is_step_due(self) -> bool:
        """True when the next step() is the optimiser's: all micro-batches are in."""

    def has_overflow(self) -> bool:
        """True where half-precision gradients have overflowed on any rank."""

    def step(self, *, discard: bool = False) -> StepReport | None:
        """Step the optimiser when all micro-batches are in, or discard them; else None."""

    def averaged(self) -> AbstractContextManager[None]:
        """The moving average of the weights in their place; every rank must enter and leave."""

    def gathered(self, of: nn.Module) -> AbstractContextManager[None]:
        """All parameters of ``of`` whole on every rank; every rank must enter and leave."""

    def stream_state(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Each of these whole, one at a time, clone to keep; all ranks must go through all."""


class RolloutBackend(Protocol):
    """Makes responses with the actor's current weights."""

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """One response per prompt."""


class Tracker(Protocol):
    """Takes what a run has to tell."""

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    def finish(self) -> None:
        """Flush and close."""


class Judge(Protocol):
    """Knows the true quality of responses; used to judge a run, never to train one."""

    def rate(self, prompt: str, response: str, *, ended: bool) -> Mapping[str, float]:
        """Return "gold", the score of a response text in [0, 1], "exact" and the score's parts."""

    def best_accuracy(self, records: list[Any]) -> float:
        """Expected accuracy of the best possible reward model on these preference records."""

    def minimal_pairs(self, prompt: str, *, seed: int) -> Mapping[str, tuple[str, str]]:
        """Return, by kind, a right response and one that differs in a single flaw."""


Schedule = Callable[[int], float]  # share of the peak learning rate at an optimiser step
