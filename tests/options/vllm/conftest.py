"""A server for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.options.vllm.stand_in import StandIn


@pytest.fixture
def server() -> Iterator[StandIn]:
    from tests.options.vllm.stand_in import StandIn  # after the emulated GPU, if there is one

    stand_in = StandIn()
    yield stand_in
    stand_in.close()
