"""Every instruction set of this CPU, one after another."""

import pytest

from rlhf.base.cpu import MAX_ISA, Isa, read_cpu, usable_isa

LEVELS = [level for level in Isa if level <= read_cpu().isa]


def capped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Isa:
    monkeypatch.setenv(MAX_ISA, request.param.name)
    assert usable_isa() is request.param
    return request.param


@pytest.fixture(params=LEVELS, ids=lambda x: x.name)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Isa:
    """One level after another, up to this CPU's own; without AVX2, torch computes."""
    return capped(request, monkeypatch)


@pytest.fixture(params=LEVELS[1:], ids=lambda x: x.name)
def compiled_isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Isa:
    """The levels from AVX2 on."""
    return capped(request, monkeypatch)
