"""The average on the host, weights that stay int8, and what DeepSpeed cannot build on a machine."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.base.errors import CapabilityError
from rlhf.config.choices import Dtype
from rlhf.engine import deepspeed_engine, masters
from rlhf.engine.deepspeed_engine import DeepSpeedEngine, require_aligned_nvme_gradients
from rlhf.engine.masters import Masters
from rlhf.engine.torch_engine import TorchEngine
from rlhf.options.average.moving_average import MovingAverage
from tests.engine.test_torch_engine import ADAMW, engine_of, train
from tests.pretend_cuda.gpu import Gpu


def averages(kind: Any, stage: int, dtype: Dtype, *, offload_ema: bool) -> list[Tensor]:
    """The average that is exported after three steps, and the weights that are back afterwards."""
    follow = partial(MovingAverage, beta=0.75, on_host=offload_ema)
    engine = engine_of(kind, stage=stage, dtype=dtype, optimizer=replace(ADAMW, follow=follow))
    for step in range(3):
        train(engine, step)
    with engine.follower.swap_in(), engine.gather_parameters(engine.module):
        average = [p.detach().clone() for p in engine.module.parameters()]
    with engine.gather_parameters(engine.module):
        return [*average, *(p.detach().clone() for p in engine.module.parameters())]


@pytest.mark.parametrize(
    ("kind", "stage", "dtype"),
    [
        (TorchEngine, 1, Dtype.bf16),
        (DeepSpeedEngine, 0, Dtype.fp32),
        (DeepSpeedEngine, 1, Dtype.bf16),
    ],
)
def test_on_a_cpu_the_host_is_where_the_average_is_anyway(
    kind: Any, stage: int, dtype: Dtype
) -> None:
    there = averages(kind, stage, dtype, offload_ema=True)
    here = averages(kind, stage, dtype, offload_ema=False)
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


def test_stage_0_computes_in_bf16_where_deepspeed_sees_the_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Around its forward pass DeepSpeed turns off an autocast of CUDA, and never one of a CPU."""
    engine = engine_of(DeepSpeedEngine, stage=0, dtype=Dtype.bf16)
    is_enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *at: not at or is_enabled(*at))
    linear = next(each for each in engine.module.modules() if isinstance(each, nn.Linear))
    dtypes = []
    linear.register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    train(engine, 0)
    assert set(dtypes) == {torch.bfloat16}


def average_of(weights: Tensor) -> MovingAverage:
    """The average on the host of weights after one step, which leaves them as they are."""
    start = weights.clone()
    average = MovingAverage(Masters([weights], lambda: None), beta=0.75, on_host=True)
    weights += 1.0
    average.update()
    with average.swap_in():
        torch.testing.assert_close(weights, start + 0.25)
    assert torch.equal(weights, start + 1.0)
    return average


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4)])
def test_chunks_change_nothing(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masters, "CHUNK", 4)
    average_of(torch.randn(shape, generator=torch.Generator().manual_seed(1)))


def test_beside_a_gpu_the_average_is_pinned(gpu: Gpu) -> None:
    average = average_of(torch.randn(40, generator=torch.Generator().manual_seed(1)).cuda())
    assert all(kept.is_pinned() for kept in average._average)


class Int8:
    """DeepSpeed's quantizer without its GPU kernels: symmetric, one scale for 100 numbers."""

    def quantize(self, weights: Tensor, groups: int | None = None) -> tuple[Tensor, Tensor]:
        del groups
        rows = weights.float().reshape(-1, 100)
        scale = rows.abs().amax(1, keepdim=True) / 127
        return (rows / scale).round().to(torch.int8).reshape(weights.shape), scale

    def dequantize(self, packed: Tensor, scale: Tensor, dtype: Any = None) -> Tensor:
        weights = (packed.float().reshape(-1, 100) * scale.reshape(-1, 1)).reshape(packed.shape)
        return weights.to(dtype or torch.float16)


class Adapted(nn.Module):
    """A frozen layer that is large enough to be quantised, below a trained one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.frozen = nn.Linear(800, 800).requires_grad_(requires_grad=False)
        self.head = nn.Linear(800, 2)

    def forward(self, x_BI: Tensor) -> Tensor:
        return self.head(self.frozen(x_BI))


@pytest.mark.slow
def test_frozen_weights_become_int8_and_keep_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partition_parameters, stage3

    monkeypatch.setattr(deepspeed_engine, "op_unavailable_reason", lambda _: None)
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # torch emulates it
    monkeypatch.setattr(partition_parameters, "CUDAQuantizer", Int8)
    monkeypatch.setattr(stage3, "CUDAQuantizer", Int8)
    monkeypatch.setattr(partition_parameters.Init, "quantizer_module", Int8(), raising=False)
    module, plain = Adapted(), Adapted().half()
    engine = engine_of(
        DeepSpeedEngine,
        stage=3,
        dtype=Dtype.fp16,
        module=module,
        quantize_frozen_weights=True,
        extra={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    )
    shard = module.frozen.weight.ds_tensor
    assert (shard.dtype, shard.numel()) == (torch.int8, 640_000)
    assert not module.frozen.weight.requires_grad
    assert module.head.weight.ds_tensor.dtype is torch.float16
    x_BI = torch.randn(2, 800, generator=torch.Generator().manual_seed(2)).half()
    torch.testing.assert_close(engine(x_BI), plain(x_BI), atol=0.01, rtol=0.01)
    engine.backward(engine(x_BI).float().square().mean())
    engine.step()
    with engine.gather_parameters(module):
        rounding = plain.frozen.weight.abs().max() / 254
        assert (module.frozen.weight - plain.frozen.weight).abs().max() <= 1.1 * rounding


@pytest.mark.parametrize("key", ["offload_parameters", "offload_optimizer"])
def test_nvme_without_async_io_is_refused(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_engine, "_has_async_io", lambda: False)
    with pytest.raises(CapabilityError, match=r"zero.nvme_path=.*install libaio") as caught:
        engine_of(DeepSpeedEngine, stage=3, nvme_path=str(tmp_path), **{key: True})
    assert str(tmp_path) in str(caught.value)


def test_nvme_needs_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_engine, "_has_async_io", lambda: True)
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file")
    with pytest.raises(CapabilityError, match=r"Not a directory; use a writable folder") as caught:
        engine_of(DeepSpeedEngine, stage=3, nvme_path=path, offload_parameters=True)
    assert f"zero.nvme_path={path}:" in str(caught.value)


@pytest.mark.parametrize(
    ("start", "size", "is_refused"),
    [(256, 10**6, False), (257, 100, False), (200, 10**6, True), (257, 10**6, True)],
)
def test_gradients_on_nvme_start_at_whole_blocks(
    start: int, size: int, *, is_refused: bool
) -> None:
    """128 fp32 numbers are a block; what is small stays in memory and may start anywhere."""
    optimizer = SimpleNamespace(
        optimizer_swapper=SimpleNamespace(is_swappable_tensor=lambda *, numel: numel > 1000),
        grad_position={0: [0, 0, 10**6], 1: [0, start, size]},
    )
    expected = pytest.raises(CapabilityError, match=f"start {4 * start % 512} bytes into")
    with expected if is_refused else nullcontext():
        require_aligned_nvme_gradients(optimizer)


@pytest.mark.parametrize(
    "key", ["quantize_weights", "quantize_gradients", "quantize_frozen_weights"]
)
def test_quantising_without_its_kernels_is_refused(key: str) -> None:
    with pytest.raises(CapabilityError, match=rf"{key}.*install the CUDA toolkit"):
        engine_of(DeepSpeedEngine, stage=3, **{key: True})


@pytest.mark.parametrize("cards", ["9.0a", "8.0;Hopper", "8.6+PTX 9.0a"])
def test_architectures_that_deepspeed_cannot_read_are_named(
    cards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image whose TORCH_CUDA_ARCH_LIST was 9.0a ended with int()'s error and a traceback."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", cards)
    reason = deepspeed_engine.op_unavailable_reason("InferenceBuilder")
    assert f"TORCH_CUDA_ARCH_LIST={cards}: " in str(reason)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    assert "ARCH_LIST" not in str(deepspeed_engine.op_unavailable_reason("InferenceBuilder"))
