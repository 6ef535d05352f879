"""The CPU's rates, as plans use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.planning.cpu_rates import cpu_rates
from rlhf.runtime import measure_cpu as measuring


def test_measured_rates_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "SIZE", 64)
    monkeypatch.setattr(measuring, "BUFFER", 2**16)
    monkeypatch.setattr(measuring, "CALLS", 20)
    rates = measuring.measure_cpu()
    assert min(rates.fp32_tflops, rates.bandwidth_gb, rates.call_microseconds) > 0
    assert rates.is_measured
    assert cpu_rates() == rates
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("rates-")
