"""launch.py with one addition: rank 0 writes a hash of the models after each step of PPO.

    python tests/hashed_launch.py OVERRIDES...      (several ranks: torchrun instead of python)

RUN_DIR/hashes.txt gets a line per step. A hash is of every weight, master weight and moment of
actor and critic, whole, wherever they are sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rlhf.phases.ppo.loop import PPOTrainer  # noqa: E402 - found by the line above

FILE = "hashes.txt"
train_rlhf = PPOTrainer.train_rlhf


def train_and_hash(trainer: PPOTrainer, rollout: Any) -> Any:
    """Take the step, then write the hash."""
    stats = train_rlhf(trainer, rollout)
    digest = sha256()
    for name, tensor in tensors(trainer):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    if trainer.engine.ranks.is_main:
        with (Path(str(trainer.engine.config.run_dir)) / FILE).open("a") as file:
            file.write(f"{trainer.steps_done} {digest.hexdigest()}\n")
    return stats


def tensors(trainer: PPOTrainer) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole of each tensor; every rank takes part."""
    for engine in trainer.engine.trained_engines.values():
        module: Any = engine
        weights = module.stream_state(dict(module.module.named_parameters()))
        yield from chain(weights, engine.training_state.stream())


if __name__ == "__main__":
    PPOTrainer.train_rlhf = train_and_hash  # type: ignore[method-assign]
    run_path(str(ROOT / "launch.py"), run_name="__main__")
