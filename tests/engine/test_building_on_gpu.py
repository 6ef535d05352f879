"""While an engine is built, a GPU holds no more than the engine will hold, and one parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf.config.choices import Dtype
from rlhf.config.roles import Role
from rlhf.engine import masters
from rlhf.engine.masters import read
from rlhf.engine.settings import EngineSettings
from rlhf.engine.torch_engine import TorchEngine
from rlhf.types import Ranks
from tests.engine.test_torch_engine import ADAMW
from tests.pretend_cuda.gpu import Gpu
from tests.zero_settings import zero_config

LAYERS, SIZE = 16, 128
WEIGHTS = LAYERS * SIZE * SIZE


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))


def engine_of(module: nn.Module, device: torch.device, *, is_trained: bool) -> TorchEngine:
    return TorchEngine(
        module,
        role=Role.actor if is_trained else Role.reference,
        settings=EngineSettings(zero=zero_config(stage=1), dtype=Dtype.bf16),
        ranks=Ranks(0, 1, device),
        optimizer=ADAMW if is_trained else None,
    )


@pytest.mark.parametrize(
    ("trained", "bytes_per_weight"),
    [
        (0, 2),  # a frozen model
        (1, 2 + 14 / LAYERS),  # as with adapters: one layer with master, moments and average
        (LAYERS, 2 + 14),
    ],
)
def test_weights_come_one_by_one(
    gpu: Gpu, trained: int, bytes_per_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = layers()
    for layer in module[trained:]:
        layer.requires_grad_(requires_grad=False)
    monkeypatch.setattr(masters, "CHUNK", 256)
    before = gpu.used
    gpu.reset_peak()
    engine = engine_of(module, torch.device("cuda", 0), is_trained=bool(trained))
    one = SIZE * SIZE if trained else 256  # frozen weights are rounded in chunks
    assert gpu.used - before == pytest.approx(bytes_per_weight * WEIGHTS, rel=0.01)
    assert gpu.peak <= gpu.used + 3 * 4 * one
    there = [p.detach().cpu() for p in module.parameters()]
    here = [p.detach() for p in layers().parameters()]
    assert all(p.device.type == "cuda" for p in module.parameters())
    for weights, expected in zip(there, here, strict=True):
        torch.testing.assert_close(weights.float(), expected, rtol=2**-8, atol=0)
    if trained:
        exact = [read(shard).cpu() for shard in engine._optimizer.masters.shards]
        for master, expected in zip(exact, here[:trained], strict=True):
            assert torch.equal(master, expected.flatten())
