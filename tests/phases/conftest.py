"""The context of a phase, with the words that a test file has in ``SHORT``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.phases.run_pieces import Compose, Make


@pytest.fixture
def made(
    request: pytest.FixtureRequest,
    compose: Compose,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Make:
    from tests.phases.run_pieces import run_context  # imports torch, which must come later

    short = getattr(request.module, "SHORT", [])
    return lambda *more: run_context(compose, tmp_path, monkeypatch, *short, *more)
