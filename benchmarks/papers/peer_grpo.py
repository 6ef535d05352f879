"""TRL's GRPO on the task of ``learning_curves.py``, which runs this file in TRL's own environment.

A module, not a command. Needs trl 1.16.0, and of this project only the rules of the task. The
trainer is left as it is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from papers.gold_judge import GoldJudge
from papers.peer_wheels import VERSIONS

VERSION = VERSIONS["TRL"]
SETTINGS = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "logging_strategy": "no",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def train(task: dict[str, Any]) -> list[list[float]]:
    """Train the model of the task, and return the gold scores of each step."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    if trl.__version__ != VERSION:
        raise SystemExit(f"trl {trl.__version__}: the comparison is with {VERSION}")
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    judge = GoldJudge(tokenizer.eos_token_id)
    groups = task["responses"] // task["group"]
    updates = task["epochs"] * (task["responses"] // task["mini_batch"])
    trainer = trl.GRPOTrainer(
        model=task["model"],
        reward_funcs=judge,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": task["prompts"][: groups * task["steps"]]}),
        args=trl.GRPOConfig(
            output_dir=task["folder"],
            max_steps=task["steps"] * updates,
            per_device_train_batch_size=task["mini_batch"],
            steps_per_generation=task["responses"] // task["mini_batch"],
            num_iterations=task["epochs"],
            num_generations=task["group"],
            max_completion_length=task["tokens"],
            learning_rate=task["rate"],
            beta=task["penalty"],
            seed=task["seed"],
            model_init_kwargs={"dtype": "float32"},
            **SETTINGS,
        ),
    )
    trainer.train()
    return judge.given


if __name__ == "__main__":
    (file,) = map(Path, sys.argv[1:])
    file.with_name("gold.json").write_text(json.dumps(train(json.loads(file.read_text()))))
