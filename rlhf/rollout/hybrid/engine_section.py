"""DeepSpeed's config section ``hybrid_engine``, as a pure function of the run's config."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlhf.config.choices import Backend
from rlhf.config.schema.run import RunConfig


def hybrid_engine_section(config: RunConfig) -> dict[str, Any] | None:
    """Return the section for the PPO actor, or None if rollouts do not use the Hybrid Engine.

    If ``max_out_tokens`` is null, the cache holds the longest prompt plus the longest response.
    """
    rollout = config.rollout
    if rollout.backend is not Backend.hybrid_engine:
        return None
    section = {"enabled": True} | asdict(rollout.hybrid_engine)
    if section["max_out_tokens"] is None:
        section["max_out_tokens"] = rollout.max_prompt_tokens + rollout.max_response_tokens
    return section
