"""Read the command of a search, and write its solutions.

``python launch.py -m sweep=NAME`` starts a search if NAME.yaml has a ``study``, which chooses the
values of each trial from the results of earlier trials. The search space is written in Hydra's own
grammar: https://hydra.cc/docs/advanced/override_grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from hydra import compose
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf.base.atomic import write_text_atomically
from rlhf.base.errors import ConfigError
from rlhf.base.hashing import sha256_of
from rlhf.config.hydra_parts import (
    SEARCH_PATH,
    ChoiceSweep,
    IntervalSweep,
    Override,
    RangeSweep,
    composing,
    parse_overrides,
    values_of,
)
from rlhf.config.run_dir import SWEEPS
from rlhf.config.schema.run import AlarmName, RunConfig
from rlhf.config.typed import to_run_config
from rlhf.jobs.sweep_command import (
    FILE_WORDS,
    MULTIRUN,
    SWEEP_WORDS,
    format_sweep_value,
    read_sweep_definition,
    refuse_parent_folders,
)

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

STUDY = "study"

Sampler = StrEnum("Sampler", "tpe random")
"""The method that chooses the values of the next trial."""


@dataclass(kw_only=True)
class PruneConfig:
    """Keys of ``study.prune``: a trial ends early if it is worse than the median at its step."""

    metric: str
    """Metric of metrics.jsonl; `--help` says in which direction it is better."""
    after_trials: int = 4
    """Trials that must finish before any trial is pruned."""
    after_step: int = 0
    """Steps of a trial before it can be pruned."""


@dataclass(kw_only=True)
class StudyConfig:
    """Keys of ``study`` in the file of a search: objectives, limits and number of trials."""

    trials: int
    """Number of trials, including the trials of earlier commands."""
    maximize: list[str] = field(default_factory=list)
    """Results to make large, each as PHASE.NAME of result.json: ppo.gold_after."""
    minimize: list[str] = field(default_factory=list)
    """Results to make small."""
    at_most: dict[str, float] = field(default_factory=dict)
    """Constraints: results and their largest admissible values."""
    prune: PruneConfig | None = None
    """Ends bad trials early; requires a single objective. null: no trial ends early."""
    stop_on: list[AlarmName] = field(default_factory=list)
    """Alarms that end a trial early, as pruned."""
    slots: int = 1
    """Trials that run at the same time; each gets an equal share of the cores and devices."""
    sampler: Sampler = Sampler.tpe
    """tpe (Tree-structured Parzen Estimator) or random."""
    seed: int = 1
    """Seed of the sampler."""

    @property
    def objectives(self) -> list[str]:
        """Return the names of the objectives: those to maximise, then those to minimise."""
        return [*self.maximize, *self.minimize]


class Dimension(NamedTuple):
    """A key of the search space, with an interval or with the values to try."""

    key: str
    low: float = 0.0
    high: float = 0.0
    is_integer: bool = False
    is_log: bool = False
    choices: tuple[str, ...] = ()

    @property
    def example_value(self) -> str:
        """Return one admissible value, as command-line text."""
        return self.choices[0] if self.choices else str(self.low)


class Search(NamedTuple):
    """A search: its study, its space, the overrides that all trials share, and its folder."""

    study: StudyConfig
    space: list[Dimension]
    fixed: list[str]
    folder: Path


def parse_search(
    words: Sequence[str], definitions: Path, own: Sequence[Path] = ()
) -> Search | None:
    """Return the search that the command ``words`` starts, or None if it starts no search.

    ``definitions`` and ``own`` are as for ``read_sweep_definition``.
    """
    names = [word.removeprefix("sweep=") for word in words if word.startswith("sweep=")]
    if len(names) != 1 or MULTIRUN.isdisjoint(words):
        return None
    definition = read_sweep_definition(names[0], definitions, own)
    if STUDY not in definition:
        return None
    keys = (*definition, *(word.partition("=")[0] for word in words))
    if misused := [key for key in (*FILE_WORDS, *SWEEP_WORDS) if key in keys]:
        raise ConfigError(
            f"sweep={names[0]}, {misused[0]}: applies only to sweeps, whose jobs are known in "
            "advance; a study chooses values as it goes, so limit study.trials"
        )
    typed = [w for w in words if not w.startswith(("sweep=", "-")) and "=" in w]
    if hydra_words := [w for w in typed if w.startswith("hydra") and not w.startswith(SEARCH_PATH)]:
        raise ConfigError(
            f"{hydra_words[0]}: sweep={names[0]} is a study, which starts its trials itself, "
            f"study.slots at a time, in {SWEEPS}: remove this argument"
        )
    study_words = [word for word in typed if word.startswith("study.")]
    study = _build_study_config(names[0], definition.pop(STUDY), study_words)
    typed = [word for word in typed if word not in study_words]
    given = {word.partition("=")[0] for word in typed}
    defined = [f"{k}={format_sweep_value(v)}" for k, v in definition.items() if k not in given]
    try:
        overrides = parse_overrides([*defined, *typed])
    except HydraException as error:
        raise ConfigError(f"sweep={names[0]}: {error}") from error
    refuse_parent_folders(overrides)
    space = [_parse_dimension(each) for each in overrides if each.is_sweep_override()]
    fixed = [str(each.input_line) for each in overrides if not each.is_sweep_override()]
    if not space:
        raise ConfigError(f"sweep={names[0]}: no key has an interval or several values to try")
    described = {**asdict(study), "trials": 0, "slots": 0, "space": space, "fixed": fixed}
    text = json.dumps(described, sort_keys=True, default=str)
    digest = sha256_of(text.encode())[:8]
    return Search(study, space, fixed, SWEEPS / f"{names[0].replace('/', '_')}-{digest}")


def compose_example_config(search: Search, conf: Path) -> RunConfig:
    """Compose, check and return the configuration at one point of the search space."""
    words = [f"{each.key}={each.example_value}" for each in search.space]
    with composing(conf):
        return to_run_config(compose("config", [*search.fixed, *words]))


def _build_study_config(name: str, definition: Any, overrides: Sequence[str]) -> StudyConfig:
    dotted = OmegaConf.from_dotlist([word.removeprefix("study.") for word in overrides])
    try:
        study = OmegaConf.to_object(OmegaConf.merge(StudyConfig, definition, dotted))
    except (OmegaConfBaseException, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"sweep={name}, study: {reason}") from error
    assert isinstance(study, StudyConfig)
    if not study.objectives:
        raise ConfigError(f"sweep={name}, study: give maximize or minimize, such as ppo.gold_after")
    if malformed := [each for each in [*study.objectives, *study.at_most] if each.count(".") != 1]:
        raise ConfigError(
            f"sweep={name}, study: {malformed[0]} must be PHASE.NAME, such as ppo.gold_after"
        )
    if study.prune is not None and len(study.objectives) > 1:
        raise ConfigError(
            f"sweep={name}, study.prune: a study with {len(study.objectives)} objectives cannot "
            "compare unfinished trials; keep one objective, or use study.stop_on"
        )
    if min(study.trials, study.slots) < 1:
        raise ConfigError(f"sweep={name}, study: trials and slots must be above 0")
    return study


def _parse_dimension(override: Override) -> Dimension:
    """Convert an override such as ``lr=interval(1e-6,1e-4)`` to a dimension of the search space.

    Raises:
        ConfigError: if the value is no interval, range or choice.
    """
    key, value = override.key_or_group, override.value()
    match value:
        case IntervalSweep(start=start, end=end) if start is not None and end is not None:
            is_log = "log" in value.tags
            if not (0 if is_log else float("-inf")) < start < end:
                rule = "0 < LOW < HIGH" if is_log else "LOW < HIGH"
                raise ConfigError(f"{override.input_line}: give interval(LOW, HIGH), {rule}")
            return Dimension(key, start, end, is_integer=isinstance(start, int), is_log=is_log)
        case ChoiceSweep() | RangeSweep():
            return Dimension(key, choices=tuple(values_of(override)))
        case _:
            raise ConfigError(f"{override.input_line}: give an interval, a range or a choice")


def write_solutions(search: Search, best: Sequence[FrozenTrial]) -> None:
    """Write optimization_results.yaml, a file name that Hydra's Optuna sweeper uses too.

    ``best`` are the trials on the Pareto front, or all that share the best value.
    """
    content = {
        "name": "optuna",
        "maximize": search.study.maximize,
        "minimize": search.study.minimize,
        "solutions": [_describe_solution(search, trial) for trial in best],
    }
    write_text_atomically(search.folder / "optimization_results.yaml", yaml.safe_dump(content))


def trial_value_text(value: object) -> str:
    """Return a value of a trial as command-line text; floats are rounded to 4 digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _describe_solution(search: Search, trial: FrozenTrial) -> dict[str, Any]:
    """Return a trial's number, parsed parameters and results; Optuna stores choices as text."""
    return {
        "trial": trial.number,
        "best_evaluated_params": {
            key: float(text) if isinstance(value, float) else yaml.safe_load(text)
            for key, value in trial.params.items()
            for text in [trial_value_text(value)]
        },
        "best_evaluated_value": dict(zip(search.study.objectives, trial.values or (), strict=True)),
    }
