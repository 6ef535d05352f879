"""AgileRL's PPO on the task of ``ppo_curves.py``, which runs this file in its environment.

A module, not a command. Needs agilerl 2.58.0, and of this project only the rules of the task.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from papers.gold_judge import GoldJudge
from papers.peer_wheels import VERSIONS

VERSION = VERSIONS["AgileRL"]
SETTINGS = {
    "gamma": 1.0,
    "vf_coef": 1.0,
    "kl_clamp": None,
    "temperature": 1.0,
    "top_k": 0,
    "use_separate_reference_adapter": False,  # the reference is the model without adapters
    "advantage_granularity": "token",
    "importance_sampling_level": "token",
    "use_liger_loss": False,
    "gradient_checkpointing": False,
    "device": "cpu",
    "model_config": {"torch_dtype": torch.float32},
}


def train(task: dict[str, Any]) -> list[list[float]]:
    """Train the model of the task, and return the gold scores of each step."""
    from agilerl.algorithms.ppo_llm import PPO
    from peft import LoraConfig
    from transformers import AutoTokenizer

    version = importlib.metadata.version("agilerl")
    if version != VERSION:
        raise SystemExit(f"agilerl {version}: the comparison is with {VERSION}")
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    torch.manual_seed(task["seed"])
    agent = PPO(
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        model_name=task["model"],
        lora_config=LoraConfig(
            r=task["rank"],
            lora_alpha=task["alpha"],
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        batch_size=task["responses"],
        mini_batch_size=task["mini_batch"],
        micro_batch_size_per_gpu=task["mini_batch"],
        update_epochs=task["epochs"],
        max_output_tokens=task["tokens"],
        lr_actor=task["rate"],
        lr_critic=task["critic_rate"],
        beta=task["penalty"],
        clip_coef=task["cliprange"],
        gae_lambda=task["lam"],
        seed=task["seed"],
        **SETTINGS,
    )
    judge = GoldJudge(tokenizer.eos_token_id)
    for step in range(task["steps"]):
        first = step * task["responses"]
        prompts = task["prompts"][first : first + task["responses"]]
        tokenized = [dict(tokenizer(prompt, return_tensors="pt")) for prompt in prompts]
        ids, keep_action, _ = agent.get_action(tokenized)
        responses = [row[0, 1:][keep[0]] for row, keep in zip(ids, keep_action, strict=True)]
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        scores = judge(prompts, texts, [tokens.tolist() for tokens in responses])
        agent.learn(*as_turns(ids, keep_action, scores))
    return judge.given


def as_turns(
    ids: Sequence[Tensor], keep_action: Sequence[Tensor], scores: Sequence[float]
) -> tuple[tuple[Sequence[Tensor], Sequence[Tensor], Tensor], Tensor]:
    """Return the experiences with one turn for each token, and their turns (B, T - 1).

    AgileRL gives the reward of a turn to each of its tokens. With one turn for each token the last
    token alone gets the score.
    """
    width = max(keep.shape[1] for keep in keep_action)
    padded = [torch.nn.functional.pad(keep[0], (0, width - keep.shape[1])) for keep in keep_action]
    keep_BT = torch.stack(padded).bool()
    turns_BT = torch.where(keep_BT, keep_BT.cumsum(1) - 1, -1)
    lengths = keep_BT.sum(1)
    rewards = torch.zeros(len(scores), int(lengths.max()))
    rewards[torch.arange(len(scores)), lengths - 1] = torch.tensor(scores)
    return (ids, keep_action, rewards), turns_BT


if __name__ == "__main__":
    (file,) = map(Path, sys.argv[1:])
    file.with_name("gold.json").write_text(json.dumps(train(json.loads(file.read_text()))))
