"""AdamW on a GPU for weights stored as ``Split``: one kernel launch for all parameters.

The gradient norm and the moving averages also take one launch each. Triton, which compiles the
kernels, comes with torch's CUDA wheels; it is imported only for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from rlhf.base.types import copy_to_device
from rlhf.kernels.torch_adamw import AdamwScalars, SplitState

CHUNK = 2**16  # weights per program: larger chunks shorten the table, smaller ones fill a GPU
BLOCK = 2**10  # weights that a program has in registers at a time: 8 in each of 128 threads
EXACT = {"enable_fp_fusion": False}  # round after each operation, as torch does
WIDEST_LOAD = 16  # bytes of the widest load instruction


class ParameterTable:
    """A table of parameters of given ``sizes`` on a GPU, so that one launch works on all of them.

    Each launch gets the tensors' addresses anew, as every backward pass allocates new gradients.
    """

    def __init__(
        self, kernels: ModuleType, sizes: Sequence[int], device: torch.device, *, chunk: int = CHUNK
    ) -> None:
        self._kernels = kernels
        self._device = device
        self._chunks = copy_to_device(build_chunk_table(sizes, chunk), device)

    def sum_of_squares(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the sum of the squares of bf16 gradients as an fp64 scalar; None counts as 0."""
        contiguous = _make_contiguous(gradients)
        addresses, align = self._collect_addresses(contiguous)
        sums = torch.empty(len(self._chunks), device=self._device)
        self._launch("sum_squares_kernel", addresses, sums, ALIGN=align)
        return sums.sum(dtype=torch.float64)

    def step(
        self,
        states: Sequence[SplitState],
        gradients: Sequence[Tensor | None],
        scalars: Sequence[AdamwScalars],
    ) -> None:
        """Update ``states`` in place by an AdamW step; skip a state whose bf16 gradient is None."""
        contiguous = _make_contiguous(gradients)
        addresses, align = self._collect_addresses(contiguous, *zip(*states, strict=True))
        table = copy_to_device(
            torch.tensor([_compute_kernel_scalars(each) for each in scalars]), self._device
        )
        half = states[0].first.dtype is torch.bfloat16
        self._launch("adamw_step_kernel", addresses, table, HALF=half, ALIGN=align)

    def update_averages(
        self, averages: Sequence[Tensor], halves: Sequence[tuple[Tensor, Tensor]], new: float
    ) -> None:
        """Update the fp32 ``averages`` in place: average += new * (weight - average).

        ``halves`` are the high and low halves of each weight, as in ``SplitState``.
        """
        addresses, align = self._collect_addresses(averages, *zip(*halves, strict=True))
        share = copy_to_device(torch.tensor([new]), self._device)
        self._launch("average_kernel", addresses, share, ALIGN=align)

    def _collect_addresses(self, *columns: Sequence[Tensor | None]) -> tuple[Tensor, int]:
        """Return the tensors' addresses (parameters, columns) and alignment, 16 bytes or 1."""
        rows = [
            [0 if tensor is None else tensor.data_ptr() for tensor in row]
            for row in zip(*columns, strict=True)
        ]
        is_wide = all(address % WIDEST_LOAD == 0 for row in rows for address in row)
        return copy_to_device(torch.tensor(rows), self._device), WIDEST_LOAD if is_wide else 1

    def _launch(self, name: str, addresses: Tensor, *arguments: Tensor, **constants: int) -> None:
        kernel = getattr(self._kernels, name)[len(self._chunks),]
        kernel(addresses, self._chunks, *arguments, **constants, BLOCK=BLOCK, **EXACT)


def build_chunk_table(sizes: Sequence[int], chunk: int) -> Tensor:
    """Return a table (chunks, 3): tensor index, start and end of chunks of ``chunk`` elements."""
    rows = []
    for tensor, size in enumerate(sizes):
        start = torch.arange(0, size, chunk)
        rows.append(torch.stack([torch.full_like(start, tensor), start, start + chunk], dim=1))
        rows[-1][-1:, 2] = size
    return torch.cat(rows)


def _make_contiguous(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if gradient is None else gradient.contiguous() for gradient in gradients]


def _compute_kernel_scalars(scalars: AdamwScalars) -> list[float]:
    """Return the 8 scalars that adamw_step_kernel reads, computed in double precision."""
    return [
        scalars.scale,
        1.0 - scalars.beta1,
        scalars.beta2,
        1.0 - scalars.beta2,
        scalars.correction2,
        scalars.eps,
        1.0 - scalars.lr * scalars.decay,
        scalars.lr / scalars.correction1,
    ]
