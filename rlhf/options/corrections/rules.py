"""Rules for importance weights of rollouts."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import When
from rlhf.config.schema.keys import ANSWERING_PHASES
from rlhf.config.schema.run import RunConfig
from rlhf.options import Backend
from rlhf.options.corrections.keys import RolloutCorrection


def check(config: RunConfig) -> None:
    """Check that rollouts have comparable sampling probabilities if ppo.rollout_correction is set.

    With top-k or top-p a server returns probabilities over the remaining tokens only, but training
    computes them over all tokens: their ratio would not be an importance weight.
    """
    if not ANSWERING_PHASES(config) & set(config.phase.order):
        return
    rollout, correction = config.rollout, config.ppo.rollout_correction
    if correction is RolloutCorrection.none:
        return
    reasons = {
        f"rollout.backend={rollout.backend} measures no log-probabilities; use "
        + " or ".join(
            f"rollout={each}" for each in Backend if each.measures_logprobs
        ): not rollout.backend.measures_logprobs,
        "rollout.reuse_logprobs=always trains on the rollout's own log-probabilities, so that all "
        "weights are 1; use rollout.reuse_logprobs=auto": rollout.reuse_logprobs is When.always,
        f"rollout.top_p={rollout.top_p} changes what the probabilities mean; use rollout.top_p=1": (
            rollout.top_p < 1
        ),
        f"rollout.top_k={rollout.top_k} changes what the probabilities mean; use rollout.top_k=0": (
            rollout.top_k > 0
        ),
        f"rollout.min_p={rollout.min_p} changes what the probabilities mean; use rollout.min_p=0": (
            rollout.min_p > 0
        ),
        f"ppo.lr_guard_kl={config.ppo.lr_guard_kl} and ppo.rollout_correction_lr=true: both set "
        "the actor's learning rate; remove one of them": (
            config.ppo.rollout_correction_lr and config.ppo.lr_guard_kl is not None
        ),
    }
    refuse_broken_rule(reasons, f"ppo.rollout_correction={correction}: ")
