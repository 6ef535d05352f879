"""What works sends heartbeats: a step that samples or saves for hours is not stuck."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from rlhf.base.heartbeat import Heartbeat
from rlhf.base.ranks import Ranks
from rlhf.config.freeze import to_run_config
from rlhf.engine.deepspeed_engine import DeepSpeedEngine
from rlhf.engine.torch_engine import TorchEngine
from rlhf.phases.shared.supervised import measure_held_out
from rlhf.run.model_folder import write_shards
from tests.conftest import Compose
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


def test_each_tensor_and_each_file_of_a_folder_is_a_sign(tmp_path: Path, counted: Counted) -> None:
    write_shards(tmp_path, {str(n): torch.zeros(2) for n in range(3)}.items(), 16)
    assert counted.beats == 3 + 2


def test_each_decoded_token_is_a_sign(counted: Counted) -> None:
    rollout = fast(settings(min_tokens=5))
    rollout.generate(actor_of(GPT2), prompts_of([3, 2]))
    assert counted.beats >= 5


@pytest.mark.parametrize("kind", [TorchEngine, DeepSpeedEngine])
def test_each_micro_batch_of_any_phase_is_a_sign(kind: Any, counted: Counted) -> None:
    """SFT, reward model, DPO and PPO all learn by an engine's ``backward``."""
    backward, boundary = Tensor.backward, lambda: True
    deepspeed = SimpleNamespace(backward=backward, is_gradient_accumulation_boundary=boundary)
    engine = SimpleNamespace(_deepspeed=deepspeed, _num_micro_batches=1)
    for _ in range(3):
        kind.backward(engine, torch.zeros(1, requires_grad=True).sum())
    assert counted.beats == 3


def test_each_batch_of_held_out_examples_is_a_sign(counted: Counted, compose: Compose) -> None:
    context: Any = SimpleNamespace(config=to_run_config(compose([])), ranks=Ranks())
    model: Any = SimpleNamespace(evaluating=nullcontext)
    examples = Dataset.from_dict({"length": [3, 2, 4, 1]})
    measure_held_out(context, model, examples, lambda *_: {}, limit=3, micro=1)
    assert counted.beats == 3
