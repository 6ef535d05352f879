"""Rules for the group ``environment``, for keys that episodes exclude, and for their lengths."""

from __future__ import annotations

from rlhf.base.errors import ConfigError, refuse_broken_rule
from rlhf.config.choices import AdvantageEstimator, Phase, RewardKind, ScaleReward, Source
from rlhf.config.schema.run import RunConfig
from rlhf.options.environments.keys import EnvironmentConfig, EnvironmentKind, GaeUnit

EMBEDDED = (EnvironmentKind.number_guessing, EnvironmentKind.calculator, EnvironmentKind.blackjack)
PACKAGE_KINDS = (
    EnvironmentKind.gymnasium,
    EnvironmentKind.textarena,
    EnvironmentKind.reasoning_gym,
    EnvironmentKind.gem,
)
CODE_KINDS = (EnvironmentKind.tools, EnvironmentKind.custom)


def check_environment(config: RunConfig) -> None:
    """Check the keys of the environment, and the keys of other groups that episodes restrict."""
    if not config.environment.is_used:
        _refuse_episode_keys(config)
        return
    check_environment_keys(config.environment)
    rollout, ppo, source = config.rollout, config.ppo, config.data.source
    has_turns = ppo.gae_unit is GaeUnit.turn
    broken = {
        "the dpo phase: DPO learns from pairs of single responses; use phase=pipeline_rule, or "
        "environment=none": Phase.dpo in config.phase.order,
        f"data.source={source}: an episode begins with the environment's observation and a seed, "
        "which other data lack; add data=environment": source is not Source.environment,
        f"rollout.min_response_tokens={rollout.min_response_tokens}: a turn may be as short as its "
        "environment wants; use 0": rollout.min_response_tokens > 0,
        "no part of rewards uses the environment's rewards: add "
        "+rewards.environment.kind=environment, or use experiment=environment": all(
            part.kind != RewardKind.environment for part in config.rewards.values()
        ),
        f"ppo.scale_reward={ppo.scale_reward}: rewards per turn are not scores of responses; use "
        "none, and rewards.NAME.weight": ppo.scale_reward is not ScaleReward.none,
        "ppo.whiten_rewards=true and ppo.gae_unit=turn: the KL penalty is separate from rewards "
        "per turn; use only one of the two": ppo.whiten_rewards and has_turns,
        f"ppo.gae_unit=turn and ppo.advantage_estimator={ppo.advantage_estimator}: only gae has "
        "time steps; use ppo.gae_unit=token": (
            has_turns and ppo.advantage_estimator is not AdvantageEstimator.gae
        ),
        f"environment.max_tokens={config.environment.max_tokens}: an episode is shorter than one "
        f"turn, rollout.max_response_tokens={rollout.max_response_tokens}; raise the first, or "
        "lower the second": config.environment.max_tokens < rollout.max_response_tokens,
    }
    refuse_broken_rule(broken, f"environment.kind={config.environment.kind} with ")
    if Phase.ppo in config.phase.order and has_turns and ppo.lam_length_alpha is not None:
        raise ConfigError(
            f"ppo.lam_length_alpha={ppo.lam_length_alpha} counts tokens, and the time steps of "
            "ppo.gae_unit=turn are turns; remove ppo.lam_length_alpha, or use ppo.gae_unit=token"
        )


def _refuse_episode_keys(config: RunConfig) -> None:
    """Check that no key of data or rewards needs an environment, since there is none."""
    broken = {
        "rewards with kind=environment and environment.kind=none: there is no environment; choose "
        "one, such as environment=number_guessing": any(
            part.kind == RewardKind.environment for part in config.rewards.values()
        ),
        "data.source=environment with environment.kind=none: choose an environment, such as "
        "environment=number_guessing, or other data": config.data.source is Source.environment,
    }
    refuse_broken_rule(broken)


def check_environment_keys(environment: EnvironmentConfig) -> None:
    """Check that keys which the environment's kind needs are set, and keys it ignores are not."""
    kind = environment.kind
    needed = {"id": kind in PACKAGE_KINDS, "target": kind in CODE_KINDS}
    for name, is_needed in needed.items():
        value = getattr(environment, name)
        if is_needed and not value:
            example = "MODULE:CLASS" if name == "target" else "NAME"
            raise ConfigError(
                f"environment.{name} is missing: kind={kind} needs it; add "
                f"environment.{name}={example}"
            )
        if value and not is_needed:
            raise ConfigError(f"environment.{name}={value}: kind={kind} does not read it; use null")
    if kind in CODE_KINDS and not all(str(environment.target).partition(":")):
        raise ConfigError(
            f"environment.target={environment.target}: kind={kind} needs MODULE:CLASS, such as "
            "my_games:Chess"
        )
    imports_id = kind is EnvironmentKind.gymnasium and ":" in str(environment.id)  # MODULE:NAME
    if (kind in CODE_KINDS or imports_id) and not environment.run_code:
        name = "id" if imports_id else "target"
        raise ConfigError(
            f"environment.{name}={getattr(environment, name)}: runs code; if you have read it, add "
            "environment.run_code=true"
        )
    if environment.processes == 0 and kind not in EMBEDDED:
        raise ConfigError(
            f"environment.processes=0 with kind={kind}: only {', '.join(EMBEDDED)} run in the "
            "rank's own process; use environment.processes=4"
        )
