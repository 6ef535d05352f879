"""AdamW, gradient norms and averages on a GPU: one launch for all parameters, whatever their size.

Triton compiles the kernels. It comes with torch's CUDA wheels and is imported only for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from types import ModuleType

import torch
from torch import Tensor

from rlhf.base.host_copies import copy_to_device
from rlhf.kernels.adamw import AdamwScalars, SplitState
from rlhf.kernels.triton_trial import try_kernels

PART = 2**16  # weights per program: few rows in the table, many programs for a GPU to balance
BLOCK = 2**10  # weights that a program has in registers at a time: 8 in each of 128 threads
EXACT = {"enable_fp_fusion": False}  # round after each operation, as torch does
WIDE = 16  # bytes of the widest read

STILL = AdamwScalars(1.0, 0.0, 0.9, 0.9, 1.0, 0.0, 1.0, 1.0)  # a step that changes no weight


class ParameterTable:
    """Parameters of given ``sizes`` on a GPU, on all of which one launch works.

    Each launch gets the addresses of the data anew, since gradients move with every backward pass.
    """

    def __init__(
        self, kernels: ModuleType, sizes: Sequence[int], device: torch.device, *, part: int = PART
    ) -> None:
        self._kernels = kernels
        self._device = device
        self._parts = copy_to_device(chunk_table(sizes, part), device)

    def squares(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the sum of the squares of bf16 gradients, in fp64; None counts as zeros."""
        kept = _contiguous(gradients)
        addresses, align = self._addresses(kept)
        sums = torch.empty(len(self._parts), device=self._device)
        self._launch("sum_squares", addresses, sums, ALIGN=align)
        return sums.sum(dtype=torch.float64)

    def step(
        self,
        states: Sequence[SplitState],
        gradients: Sequence[Tensor | None],
        numbers: Sequence[AdamwScalars],
    ) -> None:
        """Take one AdamW step on bf16 gradients, in place; nothing changes without a gradient."""
        kept = _contiguous(gradients)
        addresses, align = self._addresses(kept, *zip(*states, strict=True))
        scalars = copy_to_device(torch.tensor([_scalars(each) for each in numbers]), self._device)
        half = states[0].first.dtype is torch.bfloat16
        self._launch("step", addresses, scalars, HALF=half, ALIGN=align)

    def average(
        self, averages: Sequence[Tensor], halves: Sequence[tuple[Tensor, Tensor]], new: float
    ) -> None:
        """Add ``new`` times the difference to the weights to the fp32 ``averages``, in place.

        ``halves`` are the upper and lower halves of the weights, as in ``SplitState``.
        """
        addresses, align = self._addresses(averages, *zip(*halves, strict=True))
        share = copy_to_device(torch.tensor([new]), self._device)
        self._launch("average", addresses, share, ALIGN=align)

    def _addresses(self, *columns: Sequence[Tensor | None]) -> tuple[Tensor, int]:
        """Return the addresses, one row per parameter, and the bytes of which all are multiples."""
        rows = [
            [0 if tensor is None else tensor.data_ptr() for tensor in row]
            for row in zip(*columns, strict=True)
        ]
        is_wide = all(address % WIDE == 0 for row in rows for address in row)
        return copy_to_device(torch.tensor(rows), self._device), WIDE if is_wide else 1

    def _launch(self, name: str, addresses: Tensor, *arguments: Tensor, **constants: int) -> None:
        kernel = getattr(self._kernels, name)[len(self._parts),]
        kernel(addresses, self._parts, *arguments, **constants, BLOCK=BLOCK, **EXACT)


def chunk_table(sizes: Sequence[int], part: int) -> Tensor:
    """Return rows (tensor, start, end) that cut tensors of given ``sizes`` into parts."""
    rows = []
    for tensor, size in enumerate(sizes):
        start = torch.arange(0, size, part)
        rows.append(torch.stack([torch.full_like(start, tensor), start, start + part], dim=1))
        rows[-1][-1:, 2] = size
    return torch.cat(rows)


@cache
def adamw_gpu_kernels(device: torch.device) -> ModuleType | None:
    """Return the kernels for a GPU; None, and a line in the log, if they do not run there."""
    otherwise = "AdamW takes 20 launches for each parameter instead of one for all, which is slower"
    return try_kernels(partial(_load, device), otherwise=otherwise)


def _load(device: torch.device) -> ModuleType:
    """Import the kernels; compile and launch each, on one weight."""
    from rlhf.kernels import adamw_triton

    table = ParameterTable(adamw_triton, [1], device)
    half = torch.zeros(1, dtype=torch.bfloat16, device=device)
    low, mean = half.to(torch.int16), half.float()
    table.step([SplitState(half, low, mean, mean.clone())], [half.clone()], [STILL])
    table.average([mean], [(half, low)], 0.5)
    float(table.squares([half]))  # waits: a launch that fails is noticed here
    return adamw_triton


def _contiguous(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if gradient is None else gradient.contiguous() for gradient in gradients]


def _scalars(numbers: AdamwScalars) -> list[float]:
    """Return the numbers that adamw_triton.step reads, computed in double precision."""
    return [
        numbers.scale,
        1.0 - numbers.beta1,
        numbers.beta2,
        1.0 - numbers.beta2,
        numbers.correction2,
        numbers.eps,
        1.0 - numbers.lr * numbers.decay,
        numbers.lr / numbers.correction1,
    ]
