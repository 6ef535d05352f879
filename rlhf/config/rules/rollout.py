"""Rules for the config group ``rollout``."""

from __future__ import annotations

from rlhf.base.errors import refuse_first
from rlhf.config.choices import When
from rlhf.config.schema.run import RunConfig
from rlhf.options import Backend


def check_rollout(config: RunConfig) -> None:
    """Check that the backend supports the settings, and that no stop text is empty."""
    rollout = config.rollout
    broken = {
        f"rollout.stop={rollout.stop}: an empty text would end every response at its first token; "
        "remove the empty text from the list": "" in rollout.stop,
        f"rollout.reuse_logprobs=always with rollout.backend={rollout.backend}: only "
        "rollout.backend=fast measures log-probabilities; use rollout.backend=fast, or "
        "rollout.reuse_logprobs=auto": (
            rollout.reuse_logprobs is When.always and rollout.backend is not Backend.fast
        ),
    }
    refuse_first(broken)
