"""Find the machine's devices, and refuse what they cannot do."""

import os

import pytest
import torch

from rlhf.base.errors import CapabilityError
from rlhf.base.ranks import Ranks
from rlhf.config.choices import Device, Dtype
from rlhf.engine import devices
from rlhf.engine.devices import (
    check_gpus,
    current_ranks,
    peak_memory_gib,
    read_driver_version,
    reset_peak_memory,
    resolve_dtype,
)
from tests.pretend_cuda.gpu import GIB, Card, Gpu

V100 = Card("Tesla V100-SXM2-32GB", int(31.7 * GIB), (7, 0))
PROC = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two V100, as torch shows them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100-SXM2-32GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: [])  # of no build in particular
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


@pytest.mark.parametrize("gpu", [V100], indirect=True)
def test_a_gpu_without_kernels_is_refused(gpu: Gpu) -> None:
    with pytest.raises(CapabilityError) as refused:
        check_gpus(1)
    assert str(refused.value) == (
        "hardware.device=cuda: Tesla V100-SXM2-32GB (sm_70) is not a GPU that this build of torch "
        "supports (sm_75, sm_80, sm_86, sm_90, sm_100, sm_120); install a build of torch "
        "for CUDA 12.6, which has them for older GPUs, or use hardware=cpu"
    )


@pytest.mark.parametrize(
    ("kernels", "capability", "has"),
    [
        (["sm_80"], (8, 0), True),
        (["sm_80"], (8, 9), True),
        (["sm_86"], (8, 0), False),
        (["sm_80"], (9, 0), False),
        (["sm_80", "compute_80"], (9, 0), True),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_100"], (10, 0), True),
        (["sm_120"], (10, 0), False),
    ],
)
def test_kernels_run_on_their_own_generation(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, kernels: list[str], capability, has: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if has:
        check_gpus(1)
    else:
        with pytest.raises(CapabilityError, match="is not a GPU that this build"):
            check_gpus(1)


def test_the_driver_is_read(tmp_path) -> None:
    assert read_driver_version(tmp_path / "none") is None
    for text, version in ((PROC, "535.104.05"), (OPEN, "580.65.06"), ("?", None)):
        (tmp_path / "version").write_text(text)
        assert read_driver_version(tmp_path / "version") == version


@pytest.mark.parametrize(
    ("built", "driver", "remedy"),
    [
        (None, None, "install a CUDA build of torch and check nvidia-smi"),
        ("13.0", "580.65.06", "check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        ("13.0", None, "check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (
            *("13.0", "535.104.05"),
            "update the NVIDIA driver 535.104.05 to 580 or newer, which this torch (CUDA 13.0) "
            "needs; or install a torch for an older CUDA",
        ),
    ],
)
def test_a_gpu_that_torch_cannot_use_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, built: str | None, driver: str | None, remedy: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(devices, "read_driver_version", lambda: driver)
    with pytest.raises(CapabilityError) as refused:
        check_gpus(1)
    assert str(refused.value) == (
        f"hardware.device=cuda: torch finds no GPU here; use hardware=cpu, or {remedy} "
        "(plan=only needs no GPU)"
    )


def test_a_phase_has_its_own_peak(gpu: Gpu) -> None:
    ranks = Ranks(0, 1, torch.device("cuda", 0))
    before = gpu.used
    large = torch.zeros(GIB // 4, dtype=torch.uint8, device="cuda")
    del large
    assert peak_memory_gib(ranks) >= 0.25
    reset_peak_memory(ranks)
    torch.zeros(2**20, dtype=torch.uint8, device="cuda")
    assert peak_memory_gib(ranks) == pytest.approx((before + 2**20) / GIB, abs=1e-4)


def test_nccl_starts_on_its_gpu_and_ends_with_the_process(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, at_exit = {}, []
    distributed = torch.distributed
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(
        distributed, "init_process_group", lambda kind, **how: started.update(how, kind=kind)
    )
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(devices.atexit, "register", lambda end, *_, **__: at_exit.append(end))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert current_ranks(Device.cuda).device == torch.device("cuda", 0)
    assert started["kind"] == "nccl"
    assert started["device_id"] == torch.device("cuda", 0)
    assert isinstance(started["store"], torch.distributed.FileStore)  # its threads use the store
    assert distributed.destroy_process_group in at_exit
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
