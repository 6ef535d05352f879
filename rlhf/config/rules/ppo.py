"""Rules for the config group ``ppo``."""

from __future__ import annotations

from rlhf.base.errors import ConfigError, refuse_first
from rlhf.config.choices import AdvantageEstimator, KlEstimator, KlPlacement
from rlhf.config.schema.ppo import COMPARING, SurrogateName
from rlhf.options import PpoConfig


def check_ppo(ppo: PpoConfig) -> None:
    """Check options of PPO that require or exclude one another."""
    estimator, compares = ppo.advantage_estimator, ppo.advantage_estimator in COMPARING
    broken = {
        "ppo.steps and ppo.epochs are both null: set one, or both, as caps": (
            ppo.steps is None and ppo.epochs is None
        ),
        f"ppo.advantage_estimator={estimator} compares the responses of one prompt, and "
        "ppo.responses_per_prompt=1; use 2 or more": compares and ppo.responses_per_prompt == 1,
        f"ppo.whiten_rewards=true: {estimator} compares whole responses, not tokens; set "
        "ppo.whiten_rewards=false": compares and ppo.whiten_rewards,
        "ppo.kl_estimator=k1 with ppo.kl_placement=loss: the gradient of k1 is 0 on average; use "
        "ppo.kl_estimator=k3, or k2": (
            ppo.kl_placement is KlPlacement.loss and ppo.kl_estimator is KlEstimator.k1
        ),
        f"ppo.kl_horizon={ppo.kl_horizon}: with ppo.kl_target, must be above a fifth of "
        f"ppo.rollout_batch_size={ppo.rollout_batch_size}, otherwise ppo.kl_ctl could fall below "
        f"0; use {ppo.rollout_batch_size // 5 + 1} or more": (
            ppo.kl_target is not None and ppo.rollout_batch_size >= 5 * ppo.kl_horizon
        ),
    }
    refuse_first(broken)
    if estimator is not AdvantageEstimator.gae:
        _refuse_critic_keys(ppo)
    _check_actor(ppo)


def _check_actor(ppo: PpoConfig) -> None:
    broken = {
        f"ppo.actor_freeze_steps={ppo.actor_freeze_steps}: the actor must learn in some of "
        f"ppo.steps={ppo.steps}; use a number below {ppo.steps}": (
            ppo.steps is not None and ppo.actor_freeze_steps >= ppo.steps
        ),
        f"ppo.dual_clip={ppo.dual_clip}: only ppo.surrogate=clip has a second clip; remove "
        "ppo.dual_clip, or use ppo.surrogate=clip": (
            ppo.dual_clip is not None and ppo.surrogate is not SurrogateName.clip
        ),
    }
    refuse_first(broken)


def _refuse_critic_keys(ppo: PpoConfig) -> None:
    given = {
        "ppo.actor_freeze_steps": ppo.actor_freeze_steps or None,
        "ppo.lam_critic": ppo.lam_critic,
        "ppo.lam_length_alpha": ppo.lam_length_alpha,
    }
    for key, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{key}={str(value).lower()}: ppo.advantage_estimator={ppo.advantage_estimator} "
                f"has no critic; remove {key}, or use ppo.advantage_estimator=gae"
            )
