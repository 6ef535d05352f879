"""TRL's PPO on the work of ``ppo_step.py``, which runs this file in TRL's own environment.

A module, not a command. Needs trl 1.12.0, the last release with PPO, and nothing of this project:
the trainer is left as it is; its functions are wrapped to read the clock. Precision and memory are
its fp32 mode without gradient checkpointing, one micro-batch, one optimiser for policy and values.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from common import WARM_UPS, peak_gb, start
from shapes import FIRST_ID, Work

SETTINGS = {
    "num_ppo_epochs": 1,
    "num_mini_batches": 1,
    "gradient_accumulation_steps": 1,
    "stop_token": None,  # responses never end early
    "temperature": 1.0,
    "kl_coef": 0.1,
    "missing_eos_penalty": None,
    "num_sample_generations": 0,
    "bf16": False,
    "gradient_checkpointing": False,
    "optim": "adamw_torch_fused",
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}


class Clock:
    """When each iteration began to generate, to score and to train, and when it was over."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {"generate": [], "score": [], "train": [], "end": []}

    def read(self, part: str) -> None:
        """``part`` begins now."""
        self.times[part].append(time.perf_counter())

    def seconds(self, iteration: int) -> dict[str, float]:
        """Parts of one iteration; all of it lasts until the next one begins."""
        starts = {name: times[iteration] for name, times in self.times.items()}
        return {
            "generate": starts["score"] - starts["generate"],
            "score": starts["train"] - starts["score"],
            "train": starts["end"] - starts["train"],
            "iteration": self.times["generate"][iteration + 1] - starts["generate"],
        }


def trainer(folder: Path, work: Work, vocab: int, *, iterations: int) -> Any:
    """TRL's trainer on the models of ``folder``."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    policies = [
        AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
        for _ in range(2)
    ]
    scorers = [
        AutoModelForSequenceClassification.from_pretrained(folder / "reward", dtype=torch.float32)
        for _ in range(2)
    ]
    rows = work.sequences * iterations
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(FIRST_ID, vocab, (rows, work.prompt_tokens), generator=generator)
    return PPOTrainer(
        args=PPOConfig(
            output_dir=str(folder / "trl"),
            total_episodes=rows,
            response_length=work.response_tokens,
            per_device_train_batch_size=work.sequences,
            local_rollout_forward_batch_size=work.sequences,
            **SETTINGS,
        ),
        processing_class=AutoTokenizer.from_pretrained(folder / "policy"),
        model=policies[0],
        ref_model=policies[1],
        reward_model=scorers[0],
        value_model=scorers[1],
        train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
        eval_dataset=Dataset.from_dict({"input_ids": ids[:1].tolist()}),
    )


def watch(trained: Any, clock: Clock) -> None:
    """Let the trainer's own calls read the clock."""
    from transformers import TrainerCallback
    from trl.experimental.ppo import ppo_trainer

    generation = ppo_trainer.batch_generation

    def timed_generation(*arguments: Any, **named: Any) -> Any:
        clock.read("generate")
        made = generation(*arguments, **named)
        clock.read("score")
        return made

    class End(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.read("end")

    ppo_trainer.batch_generation = timed_generation
    trained.model.register_forward_pre_hook(lambda *_: clock.read("train"))
    trained.add_callback(End())


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each part in the iterations after the warm-ups, and the peak memory."""
    import torch

    work, clock = Work(**task["work"]), Clock()
    counted = range(WARM_UPS, WARM_UPS + task["repeats"])
    # One iteration more: an iteration ends where the next one begins.
    trained = trainer(Path(task["folder"]), work, task["vocab"], iterations=counted.stop + 1)
    watch(trained, clock)
    trained.train()
    parts = [clock.seconds(iteration) for iteration in counted]
    found: dict[str, Any] = {name: [part[name] for part in parts] for name in parts[0]}
    return found | {"peak_gb": peak_gb(torch.device("cpu"))}


if __name__ == "__main__":
    start(None, measure)
