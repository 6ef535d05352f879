"""The CPU's rates, as plans use them."""

import time
from pathlib import Path

import pytest

from rlhf.config.machine_rates import cpu_rates
from rlhf.jobs import measure_cpu as measuring


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "SIZE", 64)
    monkeypatch.setattr(measuring, "BUFFER", 2**16)
    monkeypatch.setattr(measuring, "CALLS", 20)


def test_measured_rates_are_kept(tmp_path: Path) -> None:
    rates = measuring.measure_cpu()
    assert min(rates.fp32_tflops, rates.bandwidth_gb, rates.call_microseconds) > 0
    assert rates.is_measured
    assert cpu_rates() == rates
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("rates-")


@pytest.mark.parametrize(("share", "was_busy"), [(0.98, False), (0.7, True)])
def test_a_core_that_nothing_else_uses_is_idle(
    share: float, was_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread never has all of its core's time; the other 15 threads of 16 say nothing."""
    monkeypatch.setattr(time, "thread_time", lambda: share * time.perf_counter())
    monkeypatch.setattr(time, "process_time", lambda: 16 * share * time.perf_counter())
    assert measuring.measure_cpu().was_busy is was_busy
