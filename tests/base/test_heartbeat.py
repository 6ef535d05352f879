"""What works sends heartbeats: a step that samples or saves for hours is not stuck."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlhf.base.heartbeat import Heartbeat
from rlhf.checkpoint.model_folder import write_shards
from tests.rollout.test_fast import GPT2, actor_of, fast, prompts_of, settings


class Counted(Heartbeat):
    """Counts the heartbeats."""

    beats = 0

    def beat(self) -> None:
        """Count."""
        self.beats += 1


@pytest.fixture
def counted() -> Iterator[Counted]:
    """A heartbeat that is expected."""
    found = Counted()
    found.start()
    yield found
    Heartbeat.current = None


def test_each_tensor_of_a_folder_is_a_sign(tmp_path: Path, counted: Counted) -> None:
    write_shards(tmp_path, {str(n): torch.zeros(2) for n in range(3)}.items(), 1 << 20)
    assert counted.beats == 3


def test_each_decoded_token_is_a_sign(counted: Counted) -> None:
    rollout = fast(settings(min_tokens=5))
    rollout.generate(actor_of(GPT2), prompts_of([3, 2]))
    assert counted.beats >= 5
