"""Seconds of the parts of PPO iterations, in a process of its own.

A module that ``ppo_step.py``, ``scaling.py`` and ``shared_trunk.py`` run, not a command.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import WARM_UPS, peak_gb, start
from shapes import Work, run_config

if TYPE_CHECKING:
    from rlhf.base.types import Engine, PromptBatch, Responses

GENERATED = "time/generate_seconds"
FIRST = "\n\nHuman: go\n\nAssistant:"  # what waiting.py says first


class Capped:
    """A rollout backend whose row i ends after ``limits[i]`` tokens; a ``RolloutBackend``."""

    def __init__(self, backend: Any, limits: list[int]) -> None:
        self._backend = backend
        self._limits = limits

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """One response per prompt, none longer than its limit."""
        responses: Responses = self._backend.generate(actor, prompts, limits=self._limits)
        return responses


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each part in the iterations after the warm-ups, and the peak memory.

    Beside them the response tokens, and whether scoring took the rollout's own log-probabilities.
    """
    import torch

    from rlhf import PPOTrainer, RLHFEngine
    from rlhf.base.cpu import num_usable_cores
    from rlhf.engine.devices import set_torch_threads
    from rlhf.engine.idle_threads import sleep_early_on_shared_cores
    from rlhf.runtime.worker import keep_freed_memory

    set_torch_threads(num_usable_cores())
    work = Work(**task["work"])
    config = run_config(Path(task["folder"]), work, task["overrides"])
    if config.hardware.keep_freed_memory:
        keep_freed_memory()
    engine = RLHFEngine(config)
    if task.get("limits"):
        engine.rollout = Capped(engine.rollout, task["limits"])
    trainer = PPOTrainer(engine, config.ppo)
    device = engine.ranks.device
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    parts = []
    with sleep_early_on_shared_cores():
        for step in range(WARM_UPS + task["repeats"]):
            prompts = work.prompts(step, vocab=task["vocab"], device=device)
            if task.get("episodes"):
                rows = len(prompts.texts)
                prompts = prompts._replace(seeds=[step] * rows, texts=[FIRST] * rows)
            parts.append(_iteration(trainer, prompts, wait))
    counted = parts[WARM_UPS:]
    found: dict[str, Any] = {name: [part[name] for part in counted] for name in counted[0]}
    return found | {"peak_gb": peak_gb(device)}


def _iteration(trainer: Any, prompts: PromptBatch, wait: Callable[[], None]) -> dict[str, float]:
    """Seconds of the parts; generation has waited for its tokens when the trainer reads its clock.

    Seconds of scoring are all others until the GPU has nothing left to do.
    """
    wait()
    started = time.perf_counter()
    rollout = trainer.generate_experience(prompts)
    wait()
    scored = time.perf_counter()
    metrics = trainer.train_rlhf(rollout).metrics
    wait()
    ended = time.perf_counter()
    return {
        "generate": metrics[GENERATED],
        "score": scored - started - metrics[GENERATED],
        "train": ended - scored,
        "iteration": ended - started,
        "tokens": float(rollout.responses.keep_BT.sum()),
        "tokens_with_observations": float(rollout.responses.attend_BT.sum()),
        "reused": float(rollout.reuses_logprobs),
    }


if __name__ == "__main__":
    start(None, measure)
