"""What a hardware profile says of one rank, in bytes and seconds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf.config.choices import Dtype
from rlhf.config.machine_schema import HardwareConfig
from rlhf.planning.machine import machine_of
from tests.planning.planned import Compose, changed, run_of


def profile(compose: Compose, name: str, **fields: object) -> HardwareConfig:
    return changed(run_of(compose, f"hardware={name}"), hardware=fields).hardware


def test_a_node_of_gpus(compose: Compose) -> None:
    machine = machine_of(profile(compose, "64xa100_80g"))
    assert (machine.ranks, machine.nodes, machine.ranks_per_node) == (64, 8, 8)
    assert (machine.is_gpu, machine.dtype) == (True, Dtype.bf16)
    assert machine.memory == 80 * 2**30
    assert machine.host_memory_of_node == 1900 * 2**30
    assert (machine.operations, machine.bandwidth) == (312e12, 2039e9)
    assert (machine.link, machine.network_of_node) == (300e9, 200e9)
    assert (machine.host_link, machine.nvme_of_node) == (31.5e9, 50e9)
    assert machine.price_per_hour == pytest.approx(8 * 32.77)


def test_fp32_has_a_peak_of_its_own(compose: Compose) -> None:
    assert machine_of(profile(compose, "a100_80g", dtype=Dtype.fp32)).operations == 19.5e12
    assert machine_of(profile(compose, "v100_32g")).dtype is Dtype.fp16


def test_the_ranks_of_a_cpu_share_it(compose: Compose) -> None:
    one = machine_of(profile(compose, "cpu", memory_gib=8, dtype=Dtype.bf16))
    two = machine_of(profile(compose, "cpu", memory_gib=8, dtype=Dtype.bf16, ranks_per_node=2))
    assert (one.memory, two.memory) == (8 * 2**30, 4 * 2**30)
    assert (one.operations, two.operations) == (1.6e12, 0.8e12)
    assert (one.bandwidth, two.bandwidth) == (27e9, 13.5e9)
    assert two.host_memory_of_node == one.host_memory_of_node
    assert one.price_per_hour is None


def test_auto_is_bf16_on_gpus_and_where_the_cpu_has_amx(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = profile(compose, "cpu")
    assert machine_of(profile(compose, "a100_80g", dtype=Dtype.auto)).dtype is Dtype.bf16
    read = Path.read_text
    for flags, dtype in (("fpu amx_bf16 sse", Dtype.bf16), ("fpu sse", Dtype.fp32)):

        def flagged(path: Path, *args: object, flags: str = flags) -> str:
            return flags if path == Path("/proc/cpuinfo") else read(path)

        monkeypatch.setattr(Path, "read_text", flagged)
        monkeypatch.setattr(Path, "exists", lambda path: path == Path("/proc/cpuinfo"))
        assert machine_of(cpu).dtype is dtype


@pytest.mark.parametrize(("limit", "found"), [("max", None), ("1000000", 10**6), (None, None)])
def test_memory_that_no_profile_says_is_what_this_process_may_use(
    limit: str | None, found: int | None, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Path("/sys/fs/cgroup/memory.max")
    read, exists = Path.read_text, Path.exists
    cpu = profile(compose, "cpu")
    monkeypatch.setattr(
        Path, "read_text", lambda path: f"{limit}\n" if path == group else read(path)
    )
    monkeypatch.setattr(
        Path, "exists", lambda path: limit is not None if path == group else exists(path)
    )
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine = machine_of(cpu)
    assert machine.memory == machine.host_memory_of_node == (found or here)
