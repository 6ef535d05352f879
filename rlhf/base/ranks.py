"""The ranks of a run, and their collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf.base.heartbeat import beat
from rlhf.base.metrics import Maximum, Metrics

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of ranks, and the collectives that the phases use."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        """Return True on rank 0, which prints and writes for all ranks, except checkpoints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of ``tensor`` over all ranks, on every rank."""
        return self._all_reduce(tensor, torch.distributed.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum of ``tensor`` over all ranks, on every rank."""
        return self._all_reduce(tensor, torch.distributed.ReduceOp.MAX)

    def any(self, here: bool) -> bool:
        """Return True on every rank if ``here`` is True on at least one rank."""
        return bool(self.max(torch.tensor(float(here), device=self.device)))

    def own_rows(self, rows: Sequence[T]) -> list[T]:
        """Return this rank's slice of ``rows``; the number of ranks must divide their number."""
        per_rank = len(rows) // self.size
        return list(rows[self.rank * per_rank : (self.rank + 1) * per_rank])

    def all_gather(self, here: T) -> list[T]:
        """Return the values of ``here`` on all ranks, in the order of ranks, on every rank."""
        if self.size == 1:
            return [here]
        gathered: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(gathered, here)
        return gathered

    def together(self, attempt: Callable[[], T]) -> list[T]:
        """Return the results of ``attempt`` from all ranks; raise an error of one rank on all.

        ``attempt`` may call ``report_progress``, but no other collective.
        """
        here: T | Exception
        try:
            here = attempt()
        except Exception as error:
            here = error
        while self.any(False):  # another rank reports progress
            beat()
        everywhere = self.all_gather(here)
        if errors := [result for result in everywhere if isinstance(result, Exception)]:
            raise errors[0]
        return everywhere  # type: ignore[return-value]

    def report_progress(self) -> None:
        """Record a heartbeat on all ranks: a rank that waits in ``together`` is not stuck."""
        self.any(True)
        beat()

    def _all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        if self.size == 1:
            return tensor
        # NCCL reduces contiguous GPU tensors; an offloaded optimizer's tensors are on the host.
        reduced = tensor.detach().contiguous().to(self.device, copy=True)
        torch.distributed.all_reduce(reduced, op=op)
        return reduced

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        if self.size > 1:
            torch.distributed.barrier()

    def reduce_metrics(self, metrics: Metrics) -> Metrics:
        """Return the merged metrics of all ranks; use at most two collectives for all metrics."""
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
