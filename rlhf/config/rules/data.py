"""Rules for the config groups ``data`` and ``environment``, and shares of phases not run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from rlhf.base.errors import ConfigError, refuse_first
from rlhf.config.choices import (
    SPLIT_PHASES,
    AdvantageEstimator,
    Phase,
    RewardKind,
    ScaleReward,
    Source,
)
from rlhf.config.schema.run import RunConfig
from rlhf.options import Backend, DataConfig
from rlhf.options.environments.keys import EnvironmentConfig, EnvironmentKind, GaeUnit

GENERATED = (Source.synthetic, Source.environment)


def check_data(config: RunConfig) -> None:
    """Check that the source can supply examples to every phase that runs."""
    data = config.data
    is_generated = data.source in GENERATED
    broken = {
        "data.source=environment with environment.kind=none: choose an environment, such as "
        "environment=number_guessing, or other data": (
            data.source is Source.environment and not config.environment.is_used
        ),
        f"data.path={data.path}: generated data has no path; add data=local, or data=hub": (
            is_generated and data.path is not None
        ),
        f"data.size=0: must be positive for data={data.source}; use e.g. data.size=4000": (
            is_generated and not data.size
        ),
    }
    refuse_first(broken)
    if not is_generated and not (data.path is None and data.sets):
        _check_paths("data.path", data.path)
    _check_blended_datasets(data)
    if data.eval_path is not None:
        _check_paths("data.eval_path", data.eval_path)
    if len(data.split) != len(SPLIT_PHASES) or not all(0 <= s < math.inf for s in data.split):
        raise ConfigError(
            f"data.split={data.split}: must be three numbers, each 0 or more: "
            "the proportions of sft, reward and ppo"
        )
    shares = dict(zip(SPLIT_PHASES, data.split, strict=True))
    for phase in config.phase.order:
        if not shares[phase.data_share] and not any(
            phase in (s.phases or ()) for s in data.sets.values()
        ):
            fix = f"make the number of {phase} positive, or remove {phase} from phase.order"
            if config.from_run is not None:
                fix = (
                    f"from_run={config.from_run} fixed this division; run phases that have a "
                    "share, such as phase=pipeline_rule, or start a new run without from_run"
                )
            raise ConfigError(
                f"data.split={data.split}: the {phase} phase runs and has no share; {fix}"
            )


def _check_blended_datasets(data: DataConfig) -> None:
    """Check each dataset of a blend on its own."""
    for name, dataset in data.sets.items():
        key = f"data.sets.{name}"
        for column, text in (dataset.columns or {}).items():
            if not isinstance(text, str):  # OmegaConf does not check its type
                raise ConfigError(f"{key}.columns.{column}={text}: must be a JMESPath expression")
        if not (math.isfinite(dataset.weight) and dataset.weight > 0):
            raise ConfigError(f"{key}.weight={dataset.weight}: must be above 0")
        if dataset.phases is not None and not set(dataset.phases) <= set(SPLIT_PHASES):
            raise ConfigError(
                f"{key}.phases={[p.value for p in dataset.phases]}: choose among "
                f"{', '.join(SPLIT_PHASES)}; dpo learns from the pairs of reward"
            )


def _check_paths(key: str, value: Any) -> None:
    """Check that ``value`` is a path or a list of paths."""
    paths = value if isinstance(value, list) else [value]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        raise ConfigError(
            f"{key}={'null' if value is None else value}: must be a file, a folder or a hub id, "
            "or a list of them"
        )


def drop_shares_of_absent_phases(config: RunConfig) -> RunConfig:
    """Return ``config`` with a share of 0 in data.split for every phase that does not run.

    A run of one phase keeps the shares of the others: the other phases may have runs of their own,
    and with the same data and seed no prompt is in two of these runs. A run with from_run keeps the
    division of the finished run.
    """
    order = config.phase.order
    if len(order) == 1 or config.from_run is not None:
        return config
    own = {phase.data_share for phase in order}
    shares = zip(SPLIT_PHASES, config.data.split, strict=True)
    split = [share if phase in own else 0.0 for phase, share in shares]
    return replace(config, data=replace(config.data, split=split))


EMBEDDED = (EnvironmentKind.number_guessing, EnvironmentKind.calculator, EnvironmentKind.blackjack)
OF_PACKAGES = (
    EnvironmentKind.gymnasium,
    EnvironmentKind.textarena,
    EnvironmentKind.reasoning_gym,
    EnvironmentKind.gem,
)
OF_CODE = (EnvironmentKind.tools, EnvironmentKind.custom)


def check_environment(config: RunConfig) -> None:
    """Check the keys of the environment, and that the run can talk to it."""
    if not config.environment.is_used:
        if config.ppo.gae_unit is GaeUnit.turn:
            raise ConfigError(
                "ppo.gae_unit=turn with environment.kind=none: a single response is one turn; use "
                "token"
            )
        return
    check_environment_keys(config.environment)
    rollout, ppo, source = config.rollout, config.ppo, config.data.source
    broken = {
        "the dpo phase: DPO learns from pairs of single responses; use phase=pipeline_rule, or "
        "environment=none": Phase.dpo in config.phase.order,
        f"data.source={source}: an episode begins with the environment's observation and a seed, "
        "which other data lack; add data=environment": source is not Source.environment,
        "rollout.backend=hybrid_engine: its KV cache cannot be extended by an observation; use "
        "rollout=fast": rollout.backend is Backend.hybrid_engine,
        f"rollout.min_response_tokens={rollout.min_response_tokens}: a turn may be as short as its "
        "environment wants; use 0": rollout.min_response_tokens > 0,
        "no part of rewards that has its rewards: add +rewards.environment.kind=environment, or "
        "use experiment=environment": all(
            part.kind is not RewardKind.environment for part in config.rewards.values()
        ),
        f"ppo.scale_reward={ppo.scale_reward}: rewards of turns are not scores of responses; use "
        "none, and rewards.NAME.weight": ppo.scale_reward is not ScaleReward.none,
        "ppo.whiten_rewards=true and ppo.gae_unit=turn: the KL penalty stays apart from rewards of "
        "turns; use only one of the two": ppo.whiten_rewards and ppo.gae_unit is GaeUnit.turn,
        f"ppo.gae_unit=turn and ppo.advantage_estimator={ppo.advantage_estimator}: only gae has "
        "time steps; use ppo.gae_unit=token": ppo.gae_unit is GaeUnit.turn
        and ppo.advantage_estimator is not AdvantageEstimator.gae,
        f"ppo.resampling_rounds={ppo.resampling_rounds}: episodes are not replaced; use 0": (
            ppo.resampling_rounds > 0
        ),
        f"environment.max_tokens={config.environment.max_tokens}: an episode is shorter than one "
        f"turn, rollout.max_response_tokens={rollout.max_response_tokens}; raise the first, or "
        "lower the second": config.environment.max_tokens < rollout.max_response_tokens,
    }
    refuse_first(broken, f"environment.kind={config.environment.kind} with ")


def check_environment_keys(environment: EnvironmentConfig) -> None:
    """Check the keys that a kind of environment needs, and those that it does not read."""
    kind = environment.kind
    needed = {"id": kind in OF_PACKAGES, "target": kind in OF_CODE}
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
    if kind in OF_CODE and not all(str(environment.target).partition(":")):
        raise ConfigError(
            f"environment.target={environment.target}: kind={kind} needs MODULE:CLASS, such as "
            "my_games:Chess"
        )
    if kind in OF_CODE and not environment.run_code:
        raise ConfigError(
            f"environment.target={environment.target} runs code; if you have read it, add "
            "environment.run_code=true"
        )
    if environment.processes == 0 and kind not in EMBEDDED:
        raise ConfigError(
            f"environment.processes=0 with kind={kind}: only {', '.join(EMBEDDED)} run in the "
            "rank's own process; use environment.processes=4"
        )
