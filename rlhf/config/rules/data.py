"""Rules for the config group ``data``, and shares of phases that do not run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from rlhf.base.errors import ConfigError, refuse_first
from rlhf.config.choices import (
    SPLIT_PHASES,
    Source,
)
from rlhf.config.schema.run import RunConfig
from rlhf.options import DataConfig

GENERATED = (Source.synthetic, Source.environment)


def check_data(config: RunConfig) -> None:
    """Check that the source can supply examples to every phase that runs."""
    data = config.data
    is_generated = data.source in GENERATED
    broken = {
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
