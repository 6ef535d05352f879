"""AdamW on a GPU: parts of parameters, and the number of launches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.base.ranks import Ranks
from rlhf.config.choices import MomentsDtype
from rlhf.kernels import kernels_for
from rlhf.kernels.gpu.adamw_gpu import CHUNK, ParameterTable, build_chunk_table
from rlhf.kernels.torch_adamw import AdamwScalars
from tests.engine.test_torch_engine import engine_of
from tests.pretend_cuda.gpu import Event, Gpu

SCALARS = AdamwScalars(0.37, 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975)


def test_parts_cover_each_parameter_once() -> None:
    assert build_chunk_table([5, 8, 1, 0, 9], 4).tolist() == [
        *([0, 0, 4], [0, 4, 5]),
        *([1, 0, 4], [1, 4, 8]),
        [2, 0, 1],
        *([4, 0, 4], [4, 4, 8], [4, 8, 9]),
    ]
    size = 2**31 + 5
    assert build_chunk_table([size], CHUNK)[-1].tolist() == [0, 2**31, size]


class Counted:
    """A kernel that counts its launches and computes nothing, but returns finite sums."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu = gpu
        self._name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self

    def __call__(self, addresses: Tensor, parts: Tensor, last: Tensor, **constants: Any) -> None:
        if self._name == "sum_squares_kernel":
            last.fill_(1.0)  # which counts as one
        else:
            self._gpu.note(Event.launch, self._name)


@pytest.mark.parametrize("moments", [MomentsDtype.fp32, MomentsDtype.bf16])
def test_a_step_is_few_launches_whatever_the_size(
    moments: MomentsDtype, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norm, clipping, AdamW of two groups and the average; it waits once, for the norm."""
    names = ("sum_squares_kernel", "adamw_step_kernel", "average_kernel")
    kernels = SimpleNamespace(**{name: Counted(gpu, name) for name in names})
    for name in ("adamw_kernel", "average_kernel"):  # they are not compared: they compute nothing
        monkeypatch.setattr(
            kernels_for("cuda"), name, lambda sizes, at, *_: ParameterTable(kernels, sizes, at)
        )
    counted = []
    for layers, width in ((1, 64), (100, 640)):
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        ranks = Ranks(device=torch.device("cuda", 0))
        with gpu.shapes_only():
            engine = engine_of(module=net, ranks=ranks, moments=moments)
        for parameter in net.parameters():
            parameter.grad = torch.empty_like(parameter)
        with gpu.counting() as counts:
            report = engine.step()
        assert not report.is_skipped
        assert [counts.operations[name] for name in names[1:]] == [1, 1]
        assert counts.events[Event.sync] == 1
        counted.append(counts.events[Event.launch])
    assert counted[0] == counted[1] <= 30
