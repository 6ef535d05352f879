"""Find the machine's devices, and refuse what they cannot do."""

from __future__ import annotations

import pytest
import torch

from rlhf.config.choices import Device, Dtype
from rlhf.engine.devices import check_gpus, current_ranks, resolve_dtype
from rlhf.errors import CapabilityError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two V100, as torch shows them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100-SXM2-32GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    return monkeypatch


def test_auto_is_fp16_on_gpus_that_only_emulate_bf16(gpus: pytest.MonkeyPatch) -> None:
    assert resolve_dtype(Dtype.auto, Device.cuda) is Dtype.fp16
    assert resolve_dtype(Dtype.fp32, Device.cuda) is Dtype.fp32
    gpus.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert resolve_dtype(Dtype.auto, Device.cuda) is Dtype.bf16
    assert resolve_dtype(Dtype.bf16, Device.cuda) is Dtype.bf16
    assert resolve_dtype(Dtype.fp16, Device.cuda) is Dtype.fp16


@pytest.mark.usefixtures("gpus")
def test_emulated_bf16_is_refused() -> None:
    with pytest.raises(CapabilityError) as refused:
        resolve_dtype(Dtype.bf16, Device.cuda)
    assert str(refused.value) == (
        "hardware.dtype=bf16: Tesla V100-SXM2-32GB only emulates bf16; use hardware.dtype=fp16, "
        "or hardware.dtype=auto, which is fp16 here"
    )


@pytest.mark.usefixtures("gpus")
def test_fewer_gpus_than_ranks_are_refused() -> None:
    check_gpus(2)
    with pytest.raises(CapabilityError) as refused:
        check_gpus(8)
    assert str(refused.value) == (
        "hardware.ranks_per_node=8: torch finds 2 GPUs here, and each rank needs its own; "
        "use hardware.ranks_per_node=2, or check CUDA_VISIBLE_DEVICES"
    )


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CapabilityError, match=r"hardware\.device=cuda: torch finds no GPU here;"):
        current_ranks(Device.cuda)
