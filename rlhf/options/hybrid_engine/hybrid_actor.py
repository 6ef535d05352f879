"""Prepare PPO's actor for the Hybrid Engine: its section of the config, and ``generate``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlhf.config.schema.run import RunConfig
from rlhf.models.language_model import LanguageModel


def actor_deepspeed_sections(config: RunConfig) -> dict[str, Any]:
    """Return the section ``hybrid_engine`` of DeepSpeed's config, as {name: section}.

    If ``max_out_tokens`` is null, the KV cache holds the longest prompt plus the longest response.
    """
    rollout = config.rollout
    section = {"enabled": True} | asdict(rollout.hybrid_engine)
    if section["max_out_tokens"] is None:
        section["max_out_tokens"] = rollout.max_prompt_tokens + rollout.max_response_tokens
    return {"hybrid_engine": section}


def adapt_policy(policy: LanguageModel) -> None:
    """Copy the model's ``generate`` and ``config`` to ``policy``; DeepSpeed replaces the first."""
    wrapper: Any = policy
    wrapper.generate, wrapper.config = policy.pretrained.generate, policy.pretrained.config
