"""Rules for the config group ``rollout``."""

from __future__ import annotations

from rlhf.config.choices import (
    Backend,
    When,
)
from rlhf.config.rules.hybrid import check_hybrid_engine
from rlhf.config.schema.run import RunConfig
from rlhf.errors import ConfigError


def check_rollout(config: RunConfig) -> None:
    """Check that the backend supports the settings, and that no stop text ends every response."""
    rollout = config.rollout
    if "" in rollout.stop:
        raise ConfigError(
            f"rollout.stop={rollout.stop}: an empty text would end every response at its first "
            "token; remove the empty text from the list"
        )
    if rollout.reuse_logprobs is When.always and rollout.backend is not Backend.fast:
        raise ConfigError(
            f"rollout.reuse_logprobs=always with rollout.backend={rollout.backend}: only "
            "rollout.backend=fast measures log-probabilities; use rollout.backend=fast, or "
            "rollout.reuse_logprobs=auto"
        )
    check_hybrid_engine(config)
