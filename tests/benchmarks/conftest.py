"""How tests import modules of benchmarks/, which import one another as scripts do."""

from importlib import import_module
from typing import Any

import pytest

from tests.runs import ROOT


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module by its name below benchmarks/, such as ``papers.claims``."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module
