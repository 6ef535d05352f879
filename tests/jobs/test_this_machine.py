"""hardware=auto: the GPUs that torch can use, or the CPU; what a command sets stays."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rlhf.jobs.this_machine
from rlhf.base.errors import CapabilityError
from rlhf.config.schema.hardware import HardwareConfig
from rlhf.config.typed import to_run_config
from rlhf.engine import devices
from rlhf.jobs.this_machine import (
    CARDS,
    GUESSED,
    NODES,
    WHOLE_NODE,
    apply_auto_hardware,
    find_hardware,
)
from tests.plan.planned import Compose
from tests.pretend_cuda.gpu import Gpu
from tests.pretend_cuda.machine import PART, UNKNOWN_CARD, V100
from tests.runs import ROOT, launch

SIGN = (Path("/proc/self/stat"),)  # a file that exists, as that of a driver does


@pytest.fixture(autouse=True)
def _found_anew() -> Iterator[None]:
    """What an earlier test's machine had is forgotten."""
    find_hardware.cache_clear()
    yield
    find_hardware.cache_clear()


Put = Callable[..., HardwareConfig]


@pytest.fixture
def put(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> Put:
    """The hardware of a run with these overrides, as launch.py composes it."""

    def with_machine(*words: str, choice: str = "auto") -> HardwareConfig:
        cfg = compose(["model=opt_125m", *words])
        job = SimpleNamespace(
            runtime=SimpleNamespace(choices={"hardware": choice}),
            overrides=SimpleNamespace(task=list(words)),
        )
        monkeypatch.setattr(rlhf.jobs.this_machine.HydraConfig, "get", lambda: job)
        return to_run_config(apply_auto_hardware(cfg, lambda: find_hardware(SIGN))).hardware

    return with_machine


def profile(compose: Compose, name: str) -> HardwareConfig:
    return to_run_config(compose(["model=opt_125m", f"hardware={name}"])).hardware


def test_a_machine_without_signs_of_a_gpu_is_a_cpu(tmp_path: Path, compose: Compose) -> None:
    assert profile(compose, "auto") == profile(compose, "cpu")
    machine = find_hardware((tmp_path / "none",))
    assert (machine.profile, machine.facts) == ("cpu", {})
    assert machine.choice_line == "hardware=auto: this machine's CPU, as it has no GPU"


def test_the_default_is_said_with_the_plan(tmp_path: Path) -> None:
    plan = ("plan=only", "experiment=smoke")
    assert "\nhardware=auto: this machine's CPU" in launch(*plan, cwd=tmp_path).stdout
    named = launch(*plan, "hardware=cpu", cwd=tmp_path)
    assert named.returncode == 0, named.stderr
    assert "hardware=auto" not in named.stdout


def test_one_gpu_is_used(gpu: Gpu, put: Put, compose: Compose) -> None:
    found, named = put(), profile(compose, "a100_40g")
    assert (found.device, found.ranks_per_node, found.dtype) == ("cuda", 1, "bf16")
    assert found.memory_gib == pytest.approx(39.3)  # rounded down
    for key in ("peak_tflops", "memory_bandwidth_gb", "max_micro_batch_size", "price_per_hour"):
        assert getattr(found, key) == getattr(named, key), key
    assert find_hardware(SIGN).choice_line == (
        "hardware=auto: 1 x NVIDIA A100-SXM4-40GB, 39.4 GiB, bf16; rates of a100_40g"
    )


def test_eight_gpus_are_a_node_and_what_the_command_sets_stays(
    gpu: Gpu, put: Put, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    found, named = put(), profile(compose, "8xa100_40g")
    assert (found.ranks_per_node, found.network_bandwidth_gb) == (8, named.network_bandwidth_gb)
    assert found.price_per_hour == named.price_per_hour
    typed = put("hardware.ranks_per_node=1", "hardware.dtype=fp32")
    assert (typed.device, typed.ranks_per_node, typed.dtype) == ("cuda", 1, "fp32")
    find_hardware.cache_clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (put().ranks_per_node, put().price_per_hour) == (2, None)


def test_another_profile_is_not_replaced(gpu: Gpu, put: Put, compose: Compose) -> None:
    assert put("hardware=h100_80g", choice="h100_80g") == profile(compose, "h100_80g")


WHOLE = "rates of a100_40g for the whole card (this part of it is slower than planned)"


@pytest.mark.parametrize(
    ("gpu", "name", "reason", "memory"),
    [(PART, "a100_40g", WHOLE, 19.6), (UNKNOWN_CARD, GUESSED, "planned times are a guess)", 94.9)],
    indirect=["gpu"],
)
def test_a_part_of_a_gpu_and_a_card_without_a_profile_are_used(
    gpu: Gpu, name: str, reason: str, memory: float
) -> None:
    machine = find_hardware(SIGN)
    assert machine.profile == name
    assert machine.reason.endswith(reason)
    assert machine.facts["memory_gib"] == pytest.approx(memory)


@pytest.mark.parametrize("gpu", [V100], indirect=True)
def test_a_gpu_that_torch_has_no_kernels_for_is_named(gpu: Gpu, put: Put, monkeypatch) -> None:
    message = r"device=cuda with hardware=auto, .* \(sm_70\) is not"
    with pytest.raises(CapabilityError, match=message):
        put("hardware.device=cuda")
    machine = find_hardware(SIGN)
    assert machine.profile == "cpu"
    assert machine.reason.startswith(
        "this machine's CPU, although it has a GPU: Tesla V100-SXM2-32GB (sm_70) is not a GPU"
    )
    find_hardware.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70"])  # a torch for CUDA 12.6
    assert (find_hardware(SIGN).profile, find_hardware(SIGN).facts["dtype"]) == ("v100_32g", "fp16")


def test_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(devices, "read_driver_version", lambda: "535.104.05")
    machine = find_hardware(SIGN)
    assert machine.profile == "cpu"
    assert "update the NVIDIA driver 535.104.05 to 580 or newer" in machine.reason


@pytest.mark.parametrize(
    ("card", "name", "tflops", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_80g", 989.4, 3350),
        ("NVIDIA H100 PCIe", "h100_pcie_80g", 756, 2000),
        ("NVIDIA H100 NVL", "h100_nvl_94g", 835.5, 3900),
        ("NVIDIA H200", "h200_141g", 989.4, 4800),
        ("NVIDIA H200 NVL", "h200_nvl_141g", 835.5, 4800),
        ("NVIDIA A100-SXM4-80GB", "a100_80g", 312, 2039),
        ("NVIDIA A100 80GB PCIe", "a100_pcie_80g", 312, 1935),
        ("NVIDIA A100-SXM4-40GB", "a100_40g", 312, 1555),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie_40g", 312, 1555),
        ("NVIDIA A10", "a10_24g", 125, 600),
        ("NVIDIA A10G", "a10g_24g", 70, 600),
        ("NVIDIA GH200 480GB", GUESSED, 100, 1000),
    ],
)
def test_cards_for_pcie_are_told_from_modules(
    card: str,
    name: str,
    tflops: float,
    bandwidth: float,
    gpu: Gpu,
    put: Put,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    assert find_hardware(SIGN).profile == name
    found = put()
    assert (found.peak_tflops, found.memory_bandwidth_gb) == (tflops, bandwidth)
    is_module = "SXM" in card or card in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    assert (found.link_bandwidth_gb >= 300) is is_module  # NVLink joins all modules of a node


def test_every_profile_that_is_named_exists() -> None:
    profiles = {path.stem for path in (ROOT / "conf" / "hardware").glob("*.yaml")}
    assert {*CARDS.values(), GUESSED} <= profiles
    assert {f"{WHOLE_NODE}x{name}" for name in NODES} == {p for p in profiles if p.startswith("8x")}
