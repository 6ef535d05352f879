"""Rules for importance weights of rollouts, and for interpolated policies."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import When
from rlhf.config.schema.keys import ANSWERING_PHASES
from rlhf.config.schema.run import RunConfig
from rlhf.options import Backend, PpoConfig, RolloutConfig
from rlhf.options.corrections.keys import ProximalPolicy, RolloutCorrection


def check(config: RunConfig) -> None:
    """Check that rollouts have comparable sampling probabilities if ppo.rollout_correction is set.

    With top-k or top-p a server returns probabilities over the remaining tokens only, but training
    computes them over all tokens: their ratio would not be an importance weight.
    """
    if not ANSWERING_PHASES(config) & set(config.phase.order):
        return
    rollout, correction = config.rollout, config.ppo.rollout_correction
    interpolates = config.ppo.proximal_policy is ProximalPolicy.interpolated
    if interpolates:
        _check_interpolation(config.ppo, rollout)
    if correction is RolloutCorrection.none:
        return
    reasons = {
        f"rollout.backend={rollout.backend} measures no log-probabilities; use "
        + " or ".join(
            f"rollout={each}" for each in Backend if each.measures_logprobs
        ): not rollout.backend.measures_logprobs,
        "rollout.reuse_logprobs=always trains on the rollout's own log-probabilities, so that all "
        "weights are 1; use rollout.reuse_logprobs=auto": (
            rollout.reuse_logprobs is When.always and not interpolates
        ),
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


def _check_interpolation(ppo: PpoConfig, rollout: RolloutConfig) -> None:
    """Check that no key needs the policy at the step's start: A-3PO does not run that policy.

    ppo.rollout_correction must be on, since A-3PO's loss is only correct with its weights.
    """
    reasons = {
        "ppo.rollout_correction=none: the weights of A-3PO would be missing; use "
        "ppo.rollout_correction=token": ppo.rollout_correction is RolloutCorrection.none,
        "rollout.reuse_logprobs=never: the policy at the step's start is not used; use "
        "rollout.reuse_logprobs=auto": rollout.reuse_logprobs is When.never,
        "ppo.rollout_correction_control=true: the weights change with each update; use "
        "ppo.proximal_policy=step_start": ppo.rollout_correction_control,
        f"ppo.stop_update_kl={ppo.stop_update_kl}: the proximal policy moves with the policy; "
        "remove ppo.stop_update_kl": ppo.stop_update_kl is not None,
        f"ppo.lr_guard_kl={ppo.lr_guard_kl}: the proximal policy moves with the policy; remove "
        "ppo.lr_guard_kl": ppo.lr_guard_kl is not None,
        "ppo.rollout_correction_lr=true: the weights change with each update; use "
        "ppo.proximal_policy=step_start": ppo.rollout_correction_lr,
    }
    refuse_broken_rule(reasons, "ppo.proximal_policy=interpolated with ")
