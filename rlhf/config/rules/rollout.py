"""Rules for the config group ``rollout``."""

from __future__ import annotations

from rlhf.base.errors import ConfigError
from rlhf.config.choices import (
    Backend,
    RolloutCorrection,
    When,
)
from rlhf.config.rules.hybrid import check_hybrid_engine
from rlhf.config.schema.run import RunConfig


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
    _check_correction(config)
    check_hybrid_engine(config)


def _check_correction(config: RunConfig) -> None:
    """Check that ppo.rollout_correction has sampling probabilities to compare with, if it is set.

    Under top-k or top-p a server's probabilities are those of the tokens that are left, and
    training's are those of all tokens: their ratio would mean something else.
    """
    rollout, correction = config.rollout, config.ppo.rollout_correction
    if correction is RolloutCorrection.none:
        return
    reasons = {
        f"rollout.backend={rollout.backend} measures no log-probabilities; use rollout=fast or "
        "rollout=vllm_server": rollout.backend not in (Backend.fast, Backend.vllm_server),
        f"rollout.reuse_logprobs={rollout.reuse_logprobs} trains on the rollout's own "
        "log-probabilities, so that all weights are 1; use rollout.reuse_logprobs=never": (
            rollout.reuse_logprobs is not When.never
        ),
        f"rollout.top_p={rollout.top_p} changes what the probabilities mean; use rollout.top_p=1": (
            rollout.top_p < 1
        ),
        f"rollout.top_k={rollout.top_k} changes what the probabilities mean; use rollout.top_k=0": (
            rollout.top_k > 0
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"ppo.rollout_correction={correction}: {reason}")
