"""Hydra's sweeper with paired values, and with a cap on the minutes that all jobs take."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import chain, product
from math import inf
from pathlib import Path
from typing import NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rlhf.base.errors import INTERRUPTED, ConfigError
from rlhf.base.stored_files import read_json
from rlhf.config.hydra_parts import (
    IntervalSweep,
    Override,
    build_launcher,
    call_in_this_process,
    parse_overrides,
    register_sweeper,
    values_of,
)
from rlhf.jobs.completion import complete_config
from rlhf.jobs.launch_command import read_job
from rlhf.jobs.sweep_jobs import SweepCap, read_cap
from rlhf.options.phase_store.phase_store import phase_key, shared_phases
from rlhf.run.console import Console
from rlhf.run.results import read_objective, write_json

SWEEP = "sweep.json"  # the words that all jobs of a sweep share, and the keys that differ


class PlannedJob(NamedTuple):
    """A job of a sweep with a cap, and the minutes that it is planned to take."""

    folder: Path
    cap: SweepCap
    shared: dict[str, float]
    """Minutes of phases, by the key of the phase: jobs with the same key train the phase once."""
    other_minutes: float
    """Minutes of all that is not shared."""


class JobSweeper(Sweeper):
    """The sweeper of commands with -m; ``hydra.sweeper`` has its paired keys and its cap."""

    hydra_context: HydraContext
    config: DictConfig
    launcher: Launcher

    def __init__(self, paired: list[list[str]], minutes: float, dollars: float) -> None:
        self._paired, self._has_cap = paired, min(minutes, dollars) < inf
        self._planned: list[PlannedJob] = []

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what Hydra passes, and build the launcher that the command chose."""
        self.hydra_context, self.config = hydra_context, config
        self.launcher = build_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run all jobs; exit with INTERRUPTED if the cap has stopped the sweep before its end."""
        overrides = parse_overrides(arguments, self.hydra_context.config_loader)
        jobs, folder = combine_values(overrides, self._paired), Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        self._check_jobs(jobs, overrides)
        returned = self.launcher.launch(jobs, initial_job_idx=0)
        for job in returned:
            _ = job.return_value  # raises the error of a job that failed
        if any(job.cap.describe_end() for job in _unfinished(self._planned)):
            raise SystemExit(INTERRUPTED)
        return returned

    def _check_jobs(self, jobs: list[list[str]], overrides: Sequence[Override]) -> None:
        """Check that the jobs compose, belong in the sweep's folder, and fit in its cap, if any."""
        fixed = self.config.hydra.job.config.override_dirname.exclude_keys
        words = sorted(
            str(each.input_line) if each.key_or_group in fixed else each.key_or_group
            for each in overrides
        )
        file = Path(self.config.hydra.sweep.dir) / SWEEP
        stored = read_json(file, {"words": [str]}) or {"words": words}
        if (before := stored["words"]) != words:
            raise ConfigError(
                f"hydra.sweep.dir={file.parent}: its jobs have {' '.join(before)}, but this "
                f"command has {' '.join(words)}; repeat the overrides and only add values to the "
                "swept keys, or choose another folder"
            )
        if self._has_cap:
            self._plan_jobs(jobs)
        else:
            self.validate_batch_is_legal(jobs)
        write_json(file, stored)

    def _plan_jobs(self, jobs: list[list[str]]) -> None:
        """Plan all jobs; raise ConfigError if minutes spent and planned together reach the cap."""
        with redirect_stdout(io.StringIO()):  # the jobs print the same lines when they begin
            self._planned = call_in_this_process(jobs, self.hydra_context, plan_job, self.config)
        if not (unfinished := _unfinished(self._planned)):
            return
        cap, planned = min((job.cap for job in unfinished), key=lambda cap: cap.minutes), 0.0
        trained = {key for job in self._planned if job not in unfinished for key in job.shared}
        for job in unfinished:
            new = sum(minutes for key, minutes in job.shared.items() if key not in trained)
            planned += max(0.0, new + job.other_minutes - cap.spent(job.folder.name))
            trained |= job.shared.keys()
        text = f"{cap.spent():.2f} minutes spent, {planned:.2f} planned for {len(unfinished)} jobs"
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
            f"{cap.word}: jobs of a cluster, jobs with plan=off and models of unknown size cannot "
            "have a limit; remove this argument"
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
    """Return the overrides of each job: all combinations of the values of keys not in ``paired``.

    ``paired`` has groups of keys with equally many values, which are combined as one key: a job has
    the values of a group's keys at the same index.
    """
    choices: dict[str, list[list[str]]] = {}  # words by key, or by the keys of a group
    for override in overrides:
        if isinstance(override.value(), IntervalSweep):
            raise ConfigError(
                f"{override.input_line}: a sweep has a job for each value, and an interval is for "
                "a search; give a list, a range or a choice"
            )
        key = override.get_key_element()
        words = [[f"{key}={value}"] for value in values_of(override)]
        group = next((",".join(keys) for keys in paired if key in keys), key)
        if group in choices and group != key:
            words = [a + b for a, b in zip(choices[group], words, strict=True)]
        choices[group] = words
    return [list(chain.from_iterable(parts)) for parts in product(*choices.values())]


# add_sweep_folders adds hydra/sweeper=jobs to the words of all sweeps.
register_sweeper(JobSweeper, "jobs", paired=[], minutes=inf, dollars=inf)
