"""Maximum lengths of episodes, which replace the maximum length of a single response."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig


def token_limit_after_prompt(config: RunConfig) -> tuple[str, int]:
    """Return the key that limits an episode's turns and observations, and its value in tokens."""
    return "environment.max_tokens", config.environment.max_tokens


def max_policy_tokens(config: RunConfig) -> int:
    """Return the maximum number of tokens that the policy can write in an episode."""
    return config.environment.turn_limit * config.rollout.max_response_tokens
