"""Hydra's sweeper with paired values, and with a cap on the minutes that all jobs take."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import chain, product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from rlhf.base.errors import INTERRUPTED, ConfigError
from rlhf.base.stored_files import read_json
from rlhf.jobs.completion import complete_config
from rlhf.jobs.launch_command import read_job
from rlhf.jobs.sweep_jobs import SweepCap, read_cap
from rlhf.options.phase_store.phase_store import phase_key, shared_phases
from rlhf.run.console import Console
from rlhf.run.results import read_objective, write_json

Plugins.instance()  # imports Hydra's sweepers anew, so that what was imported before is outdated
from hydra._internal.core_plugins import basic_sweeper  # noqa: E402
from hydra._internal.core_plugins.basic_launcher import BasicLauncher  # noqa: E402
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: E402

SWEEP = "sweep.json"  # the words that all jobs of a sweep share, and the keys that differ


class PlannedJob(NamedTuple):
    """A job of a sweep with a cap, and the minutes that it is planned to take."""

    folder: Path
    cap: SweepCap
    shared: dict[str, float]
    """Minutes by key of the phases that jobs with the same key train once."""
    own: float
    """Minutes of everything else."""


class JobSweeper(BasicSweeper):
    """The sweeper of commands with -m; ``hydra.sweeper`` has its pairs and its cap."""

    __module__ = BasicSweeper.__module__  # see register_sweeper

    def __init__(self, paired: list[list[str]], minutes: float, dollars: float) -> None:
        super().__init__(max_batch_size=None)
        self._paired, self._has_cap = paired, min(minutes, dollars) < inf
        self._planned: list[PlannedJob] = []

    def sweep(self, arguments: list[str]) -> Any:
        """Run all jobs; exit with INTERRUPTED if the cap has stopped the sweep before its end."""
        returned = super().sweep(arguments)
        if any(job.cap.describe_end() for job in _unfinished(self._planned)):
            raise SystemExit(INTERRUPTED)
        return returned

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], _: int | None
    ) -> list[list[list[str]]]:
        """Return one batch, with the words of each job."""
        assert self.config is not None
        fixed = self.config.hydra.job.config.override_dirname.exclude_keys
        self._words = sorted(
            str(each.input_line) if each.key_or_group in fixed else each.key_or_group
            for each in overrides
        )
        return [combine_values(overrides, self._paired)]

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Check that the jobs compose, belong in the sweep's folder and are planned in the cap."""
        assert self.config is not None
        file = Path(self.config.hydra.sweep.dir) / SWEEP
        stored = read_json(file, {"words": [str]}) or {"words": self._words}
        if (theirs := stored["words"]) != self._words:
            raise ConfigError(
                f"hydra.sweep.dir={file.parent}: it has jobs with {' '.join(theirs)}, and "
                f"this command has {' '.join(self._words)}; repeat the other words and give more "
                "values of the keys without a value, or choose another folder"
            )
        if self._has_cap:
            self._plan_jobs(batch)
        else:
            super().validate_batch_is_legal(batch)
        write_json(file, stored)

    def _plan_jobs(self, batch: Sequence[Sequence[str]]) -> None:
        """Plan all jobs; refuse to start if what is spent and what is planned reach the cap."""
        assert self.hydra_context is not None
        assert self.config is not None
        launcher = BasicLauncher()
        launcher.setup(hydra_context=self.hydra_context, task_function=plan_job, config=self.config)
        with redirect_stdout(io.StringIO()):  # the jobs print the same lines when they begin
            returns = launcher.launch(batch, initial_job_idx=0)
        self._planned = [each.return_value for each in returns]
        if not (left := _unfinished(self._planned)):
            return
        cap, planned = min((job.cap for job in left), key=lambda cap: cap.minutes), 0.0
        trained = {key for job in self._planned if job not in left for key in job.shared}
        for job in left:
            new = sum(minutes for key, minutes in job.shared.items() if key not in trained)
            planned += max(0.0, new + job.own - cap.spent(job.folder.name))
            trained |= job.shared.keys()
        text = f"{cap.spent():.2f} minutes spent, {planned:.2f} planned for {len(left)} jobs"
        if cap.spent() + planned >= cap.minutes:
            raise ConfigError(
                f"{cap.word}: the sweep would reach this limit of {cap.minutes:.2f} minutes "
                f"({text}; plan=only without the limit prints each plan); give a larger limit, or "
                "fewer seeds, steps or values"
            )
        Console().say(f"{cap.word}: {text}")


def plan_job(cfg: DictConfig) -> PlannedJob:
    """Plan the job that Hydra has composed.

    Raises:
        ConfigError: if its minutes or its price are unknown, or it cannot be stopped from here.
    """
    job = read_job(cfg)
    config, _, plan, *_ = complete_config(job)
    cap = read_cap(HydraConfig.get(), config.hardware, job.at_a_time or 1)
    if job.folder is None or job.at_a_time is None or plan is None or plan.hours is None:
        raise ConfigError(
            f"{cap.word}: jobs of a cluster, jobs with plan=off and models of unknown size have no "
            "limit; remove this word"
        )
    keys = {each: phase_key(config, each, data="", code="") for each in shared_phases(config)}
    seconds = {keys[each.phase]: each.seconds for each in plan.phases if each.phase in keys}
    shared = {key: value / 60 for key, value in seconds.items()}
    return PlannedJob(job.folder, cap, shared, plan.seconds / 60 - sum(shared.values()))


def _unfinished(jobs: Sequence[PlannedJob]) -> list[PlannedJob]:
    return [job for job in jobs if read_objective(job.folder) is None]


def combine_values(
    overrides: Sequence[Override], paired: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Return the words of each job: all combinations of values, but keys in ``paired`` by place.

    ``paired`` has groups of keys with equally many values. A job has the values of a group's keys
    that are at the same place.
    """
    choices: dict[str, list[list[str]]] = {}  # words by key, or by the keys of a group
    for override in overrides:
        key = override.get_key_element()
        (words,) = BasicSweeper.split_arguments([override], None)
        group = next((",".join(keys) for keys in paired if key in keys), key)
        if group in choices and group != key:
            words = [a + b for a, b in zip(choices[group], words, strict=True)]
        choices[group] = words
    return [list(chain.from_iterable(parts)) for parts in product(*choices.values())]


def register_sweeper() -> None:
    """Let Hydra find ``hydra/sweeper=jobs``, which add_sweep_folders adds to all sweeps.

    Hydra starts only sweepers of its own modules and of the package hydra_plugins.
    """
    basic_sweeper.JobSweeper = JobSweeper  # type: ignore[attr-defined]
    Plugins.instance().register(JobSweeper)
    target = f"{JobSweeper.__module__}.{JobSweeper.__name__}"
    node = {"_target_": target, "paired": [], "minutes": inf, "dollars": inf}
    ConfigStore.instance().store(group="hydra/sweeper", name="jobs", node=node)
