"""What a hardware profile says of one rank, in bytes and seconds."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.base.cpu import JOBS_ENV, HostLimits, num_usable_cores, usable_isa
from rlhf.config import machine_rates
from rlhf.config.choices import Dtype
from rlhf.config.machine_rates import (
    GIB,
    TFLOPS_BY_ISA,
    CpuRates,
    cpu_rates,
    lacks_rates,
    machine_of,
    rates_file,
    resolve_cpu_dtype,
    store_rates,
)
from rlhf.config.schema.hardware import HardwareConfig
from rlhf.plan.plan import plan_run, resolve_auto
from rlhf.plan.steps import Load
from tests.plan.planned import Compose, changed, run_of

RATES = CpuRates(bf16_tflops=2, fp32_tflops=0.5, bandwidth_gb=30, call_microseconds=2)


@pytest.fixture(autouse=True)
def _no_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path))


def profile(compose: Compose, name: str, **fields: object) -> HardwareConfig:
    return changed(run_of(compose, f"hardware={name}"), hardware=fields).hardware


def test_a_node_of_gpus(compose: Compose) -> None:
    machine = machine_of(profile(compose, "64xa100_80g"))
    assert (machine.ranks, machine.nodes, machine.ranks_per_node) == (64, 8, 8)
    assert (machine.is_gpu, machine.dtype) == (True, Dtype.bf16)
    assert machine.memory == pytest.approx(79.1 * 2**30)
    assert machine.host_memory_of_node == 1900 * 2**30
    assert (machine.operations, machine.bandwidth) == (312e12, 2039e9)
    assert (machine.link, machine.network_of_node) == (300e9, 200e9)
    assert (machine.host_link, machine.nvme_of_node) == (31.5e9, 50e9)
    assert machine.price_per_hour == pytest.approx(8 * 14.32)


def test_fp32_has_a_peak_of_its_own(compose: Compose) -> None:
    assert machine_of(profile(compose, "a100_80g", dtype=Dtype.fp32)).operations == 19.5e12
    assert machine_of(profile(compose, "v100_32g")).dtype is Dtype.fp16


def test_the_ranks_of_a_cpu_share_it(compose: Compose) -> None:
    given = {"memory_gib": 8, "dtype": Dtype.bf16, "peak_tflops": 1.6, "memory_bandwidth_gb": 27}
    one = machine_of(profile(compose, "cpu", **given))
    two = machine_of(profile(compose, "cpu", **given, ranks_per_node=2))
    assert (one.memory, two.memory) == (8 * 2**30, 4 * 2**30)
    assert (one.operations, two.operations) == (1.6e12, 0.8e12)
    assert (one.bandwidth, two.bandwidth) == (27e9, 13.5e9)
    assert two.host_memory_of_node == one.host_memory_of_node
    assert one.price_per_hour is None


def test_auto_is_bf16_on_gpus_and_where_the_cpu_multiplies_it(compose: Compose) -> None:
    assert machine_of(profile(compose, "a100_80g", dtype=Dtype.auto)).dtype is Dtype.bf16
    assert machine_of(profile(compose, "cpu")).dtype is resolve_cpu_dtype(Dtype.auto)


def test_rates_that_no_profile_names_are_those_of_this_cpu(compose: Compose) -> None:
    auto = profile(compose, "cpu", dtype=Dtype.fp32)
    assert lacks_rates(auto)
    assert machine_of(auto).operations == TFLOPS_BY_ISA[usable_isa()][1] * num_usable_cores() * 1e12
    store_rates(RATES)
    assert cpu_rates() == RATES
    assert not lacks_rates(auto)
    found = machine_of(auto)
    assert (found.operations, found.bandwidth, found.call_seconds) == (5e11, 30e9, 2e-6)
    assert machine_of(profile(compose, "cpu", dtype=Dtype.bf16)).operations == 2e12
    given = machine_of(profile(compose, "cpu", dtype=Dtype.fp32, fp32_tflops=1.0))
    assert (given.operations, given.bandwidth) == (1e12, 30e9)


def test_rates_of_a_busy_machine_are_measured_again(compose: Compose) -> None:
    store_rates(replace(RATES, was_busy=True))
    assert cpu_rates().is_measured
    assert lacks_rates(profile(compose, "cpu"))
    given = {"peak_tflops": 1.0, "fp32_tflops": 1.0, "memory_bandwidth_gb": 1.0}
    assert not lacks_rates(profile(compose, "cpu", **given))
    assert not lacks_rates(profile(compose, "a100_80g"))


def test_measured_rates_predict_times_and_choose_nothing(compose: Compose) -> None:
    config = run_of(compose, "hardware.dtype=bf16")
    loads = {phase: Load(steps=300, lengths=tuple(range(25, 45))) for phase in config.phase.order}
    plans = []
    for bandwidth in (10.0, 40.0):
        store_rates(replace(RATES, bandwidth_gb=bandwidth))
        plans.append(plan_run(config, loads))
    assert resolve_auto(plans[0]) == resolve_auto(plans[1])
    assert plans[0].seconds != plans[1].seconds


def test_unreadable_rates_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    rates_file().write_text('{"bf16_tflops": ')
    assert not cpu_rates().is_measured
    monkeypatch.setenv("RLHF_CACHE", "/proc/nowhere")
    store_rates(cpu_rates())
    assert not cpu_rates().is_measured


@pytest.mark.parametrize(("limit", "jobs"), [(None, 1), (10**6, 1), (10**6, 8)])
def test_memory_that_no_profile_says_is_what_this_process_may_use(
    limit: int | None, jobs: int, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = profile(compose, "cpu")
    monkeypatch.setattr(machine_rates, "read_cgroup_limits", lambda: HostLimits(limit, None))
    monkeypatch.setenv(JOBS_ENV, str(jobs))
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine = machine_of(cpu)
    assert machine.memory == machine.host_memory_of_node == (limit or here) / jobs
    typed = machine_of(replace(cpu, memory_gib=64.0, host_memory_gib=64.0))
    assert typed.memory == typed.host_memory_of_node == 64 * GIB / jobs
