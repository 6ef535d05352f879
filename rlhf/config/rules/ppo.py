"""Rules for the config group ``ppo``, and for its options that continue responses."""

from __future__ import annotations

from rlhf.base.errors import ConfigError, refuse_first
from rlhf.config.choices import AdvantageEstimator, KlEstimator, KlPlacement
from rlhf.config.schema.ppo import COMPARING, SurrogateName
from rlhf.options import Backend, PpoConfig, RolloutConfig
from rlhf.options.branches.keys import ValueTargets
from rlhf.options.environments.keys import EnvironmentConfig, GaeUnit


def check_ppo(ppo: PpoConfig, *, lora_rank: int) -> None:
    """Check options of PPO that require or exclude one another."""
    estimator, compares = ppo.advantage_estimator, ppo.advantage_estimator in COMPARING
    broken = {
        "ppo.steps and ppo.epochs are both null: set one, or both, as caps": (
            ppo.steps is None and ppo.epochs is None
        ),
        f"ppo.advantage_estimator={estimator} compares the responses of one prompt, and "
        "ppo.responses_per_prompt=1; use 2 or more": compares and ppo.responses_per_prompt == 1,
        f"ppo.resampling_rounds={ppo.resampling_rounds}: {estimator} also learns from responses "
        "with equal scores; set ppo.resampling_rounds=0, or use "
        f"ppo.advantage_estimator={', '.join(COMPARING[:-1])} or {COMPARING[-1]}": (
            ppo.resampling_rounds > 0 and not compares
        ),
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
    _check_trunk(ppo, lora_rank=lora_rank)


def _check_actor(ppo: PpoConfig) -> None:
    broken = {
        f"ppo.actor_freeze_steps={ppo.actor_freeze_steps}: the actor must learn in some of "
        f"ppo.steps={ppo.steps}; use a number below {ppo.steps}": (
            ppo.steps is not None and ppo.actor_freeze_steps >= ppo.steps
        ),
        f"ppo.teacher_path={ppo.teacher_path}: the reference of a shared trunk is a part of it; "
        "set ppo.shared_trunk=false, or remove ppo.teacher_path": (
            ppo.teacher_path is not None and ppo.shared_trunk
        ),
        f"ppo.dual_clip={ppo.dual_clip}: only ppo.surrogate=clip has a second clip; remove "
        "ppo.dual_clip, or use ppo.surrogate=clip": (
            ppo.dual_clip is not None and ppo.surrogate is not SurrogateName.clip
        ),
        f"ppo.lam_length_alpha={ppo.lam_length_alpha} counts tokens, and the time steps of "
        "ppo.gae_unit=turn are turns; remove ppo.lam_length_alpha, or use ppo.gae_unit=token": (
            ppo.lam_length_alpha is not None and ppo.gae_unit is GaeUnit.turn
        ),
    }
    refuse_first(broken)


def _refuse_critic_keys(ppo: PpoConfig) -> None:
    given = {
        "ppo.actor_freeze_steps": ppo.actor_freeze_steps or None,
        "ppo.shared_trunk": ppo.shared_trunk or None,
        "ppo.lam_critic": ppo.lam_critic,
        "ppo.lam_length_alpha": ppo.lam_length_alpha,
    }
    for key, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{key}={str(value).lower()}: ppo.advantage_estimator={ppo.advantage_estimator} "
                f"has no critic; remove {key}, or use ppo.advantage_estimator=gae"
            )


def _check_trunk(ppo: PpoConfig, *, lora_rank: int) -> None:
    if not ppo.shared_trunk:
        for key, value in (
            ("num_layers_unfrozen", ppo.num_layers_unfrozen),
            ("num_value_layers", ppo.num_value_layers),
        ):
            if value:
                raise ConfigError(
                    f"ppo.{key}={value}: requires ppo.shared_trunk=true; "
                    f"add ppo.shared_trunk=true, or remove ppo.{key}"
                )
        return
    broken = {
        "ppo.num_layers_unfrozen=null: ppo.shared_trunk=true requires the number of top layers to "
        "train; use e.g. ppo.num_layers_unfrozen=2, as in trlx": ppo.num_layers_unfrozen is None,
        "ppo.shared_trunk=true with adapters: the reference is a copy of frozen top layers, and "
        "adapters below would change the reference; use lora=none, or ppo.shared_trunk=false (with "
        "LoRA the reference is the actor itself)": lora_rank > 0,
        f"ppo.actor_freeze_steps={ppo.actor_freeze_steps}: actor and critic of a shared trunk take "
        "one step together; set ppo.actor_freeze_steps=0, or ppo.shared_trunk=false": (
            ppo.actor_freeze_steps > 0
        ),
    }
    refuse_first(broken)


def check_branches(
    ppo: PpoConfig, rollout: RolloutConfig, environment: EnvironmentConfig, *, rows: int
) -> None:
    """Check that the run has a critic, and that its responses can be continued from any token.

    ``rows`` is the number of responses per rank.
    """
    check, ranks = ppo.critic_check, ppo.rollout_batch_size // rows
    broken = {
        f"ppo.advantage_estimator={ppo.advantage_estimator}: it has no critic; use "
        "ppo.advantage_estimator=gae": ppo.advantage_estimator is not AdvantageEstimator.gae,
        f"environment.kind={environment.kind}: an environment cannot be set back to the "
        "middle of an episode; use environment=none": environment.is_used,
        f"rollout.backend={rollout.backend}: only the fast backend continues responses; use "
        "rollout=fast": rollout.backend is not Backend.fast,
        f"rollout.lag={rollout.lag}: the responses belong to the policy of an earlier step; use "
        "rollout.lag=0": rollout.lag > 0,
        "ppo.whiten_rewards=true: the critic learns rewards on a scale that each rollout changes; "
        "use ppo.whiten_rewards=false": ppo.whiten_rewards,
    }
    if ppo.value_targets is ValueTargets.monte_carlo:
        branches = ppo.value_branches
        own = {_too_many("ppo.value_branches", branches, rows): branches > rows}
        refuse_first(broken | own, "ppo.value_targets=monte_carlo with ")
    if check.every:
        own = {
            f"ppo.critic_check.states={check.states}: each rank takes pairs of states, at most one "
            f"from each of its responses; use a multiple of {2 * ranks} up to {2 * ranks * rows}": (
                check.states % (2 * ranks) > 0 or check.states > 2 * ranks * rows
            ),
            _too_many("ppo.critic_check.branches", check.branches, rows): check.branches > rows,
        }
        refuse_first(broken | own, f"ppo.critic_check.every={check.every} with ")


def _too_many(key: str, branches: int, rows: int) -> str:
    return (
        f"{key}={branches}: a rank samples the branches of a state together, and at most as many "
        f"as responses of a rollout; use at most {rows}"
    )
