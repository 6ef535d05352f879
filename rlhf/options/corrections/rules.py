"""Rules for importance weights of rollouts."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import When
from rlhf.config.schema.keys import ANSWERING_PHASES
from rlhf.config.schema.run import RunConfig
from rlhf.options import Backend


def check_correction(config: RunConfig) -> None:
    """Check that the probabilities of rollouts and training are comparable if a key compares them.

    With top-k, top-p or min-p a server returns probabilities over the remaining tokens only, but
    training computes them over all tokens: their ratio would not be an importance weight.
    """
    if not ANSWERING_PHASES(config) & set(config.phase.order):
        return
    rollout, ppo, correction = config.rollout, config.ppo, config.ppo.rollout_correction
    is_server, corrects = rollout.backend is Backend.vllm_server, correction != "none"
    is_dppo = ppo.surrogate in ("dppo_tv", "dppo_kl")
    comparing = {
        f"ppo.rollout_correction={correction}: ": corrects,
        f"ppo.off_policy_mask_kl={ppo.off_policy_mask_kl}: ": (
            is_server and ppo.off_policy_mask_kl is not None
        ),
        f"ppo.stop_update_kl={ppo.stop_update_kl}: ": is_server and ppo.stop_update_kl is not None,
        f"ppo.surrogate={ppo.surrogate}: ": is_server and is_dppo,
        f"ppo.kl_estimator={ppo.kl_estimator}: ": is_server and ppo.kl_estimator == "k3_ratio",
    }
    truncating = {
        f"rollout.{name}={value} truncates the sampling probabilities; use rollout.{name}={off}": (
            value != off
        )
        for name, value, off in (
            ("top_p", rollout.top_p, 1),
            ("top_k", rollout.top_k, 0),
            ("min_p", rollout.min_p, 0),
        )
    }
    for key, compares in comparing.items():
        if compares:
            refuse_broken_rule(truncating, key)
    reasons = {
        f"rollout.backend={rollout.backend} measures no log-probabilities; use "
        + " or ".join(
            f"rollout={each}" for each in Backend if each.measures_logprobs
        ): not rollout.backend.measures_logprobs,
        "rollout.reuse_logprobs=always trains on the rollout's own log-probabilities, so that all "
        "weights are 1; use rollout.reuse_logprobs=auto": rollout.reuse_logprobs is When.always,
        f"ppo.lr_guard_kl={config.ppo.lr_guard_kl} and ppo.rollout_correction_lr=true: both set "
        "the actor's learning rate; remove one of them": (
            config.ppo.rollout_correction_lr and config.ppo.lr_guard_kl is not None
        ),
    }
    if corrects:
        refuse_broken_rule(reasons, f"ppo.rollout_correction={correction}: ")
