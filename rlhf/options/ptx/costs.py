"""Costs of measuring the perplexity on a pretraining corpus, before and after training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.plan.phase_memory import PhaseMemory


def added_evaluation_seconds(scene: PhaseMemory, micro: int) -> float:
    """Return the seconds of two forward passes of the policy over the held-out blocks."""
    config = scene.config
    if config.data.ptx_path is None:
        return 0.0
    block = config.rollout.max_prompt_tokens + config.token_limit_after_prompt[1]
    blocks = replace(scene, load=replace(scene.load, lengths=(block,)))
    sequences = config.ppo.ptx_eval_blocks
    return 2 * blocks.no_grad_seconds(scene.models[0], sequences=sequences, micro=micro)
