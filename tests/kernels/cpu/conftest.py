"""Every instruction set of this CPU, one after another."""

import pytest

from rlhf.base.cpu import MAX_ISA, Isa, read_cpu, usable_isa


@pytest.fixture(params=[level for level in Isa if level <= read_cpu().isa], ids=lambda x: x.name)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Isa:
    """One level after another, up to this CPU's own; without AVX2, torch computes."""
    monkeypatch.setenv(MAX_ISA, request.param.name)
    assert usable_isa() is request.param
    return request.param
