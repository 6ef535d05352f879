"""The section ``hybrid_engine`` of DeepSpeed's configuration, as a pure function of ours."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlhf.config.choices import Backend
from rlhf.config.schema import RunConfig


def hybrid_engine_section(config: RunConfig) -> dict[str, Any] | None:
    """The section for the actor of PPO; None where rollouts do not use the Hybrid Engine.

    Without ``max_out_tokens`` its cache holds the longest prompt and the longest response.
    """
    rollout = config.rollout
    if rollout.backend is not Backend.hybrid_engine:
        return None
    section = {"enabled": True} | asdict(rollout.hybrid_engine)
    if section["max_out_tokens"] is None:
        section["max_out_tokens"] = rollout.max_prompt_tokens + rollout.max_response_tokens
    return section
