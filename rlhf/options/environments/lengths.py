"""Lengths of episodes, which replace those of single responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig


def tokens_after_prompt(config: RunConfig) -> tuple[str, int]:
    """Return key and value of the most tokens after a prompt, those of observations included."""
    return "environment.max_tokens", config.environment.max_tokens


def most_turns(config: RunConfig) -> int:
    """Return the most turns of the policy in an episode."""
    return config.environment.turns
