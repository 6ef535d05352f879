"""Complete the configuration of a job's run in one pass: nothing changes it afterwards.

    what Hydra composed -> typed -> keys that follow from others, or from the machine
    -> checked by what every phase needs -> its data counted -> planned

The last step writes the plan's choices in place of auto and null. The configuration of a run that
is resumed was completed when the run began; only what may change is applied to it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from rlhf.base.errors import ConfigError
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import PlanMode, Source, Template
from rlhf.config.effects import refuse_unread_keys
from rlhf.config.freeze import apply_resume_overrides, load_frozen_config, to_run_config
from rlhf.config.machine_rates import lacks_rates
from rlhf.config.roles import tokenizer_base
from rlhf.config.schema.data import drop_shares_of_absent_phases
from rlhf.config.schema.run import RunConfig
from rlhf.config.validation import refuse_secret_values
from rlhf.jobs.conversation_form import choose_template, describe_template
from rlhf.jobs.from_run import copy_keys_of_source_run, describe_differences_from_source
from rlhf.jobs.launch_command import Job
from rlhf.jobs.read_loads import read_loads
from rlhf.jobs.sweep_jobs import restrict_plans_to_share
from rlhf.jobs.this_machine import apply_auto_hardware, find_hardware
from rlhf.options import hooks_of
from rlhf.plan.plan import Plan, plan_and_configure
from rlhf.rewards.sealed import seal_judges
from rlhf.run.console import build_console
from rlhf.run.results import finished_phases, reused_phases
from rlhf.runtime.rendezvous import (
    check_ranks_can_start,
    check_ranks_started,
    is_secondary_node,
    rank_from_environment,
    replace_rank_counts,
)
from rlhf.runtime.start_checks import check_before_start


class StoppedRun(NamedTuple):
    """A run that was stopped, and that the job resumes."""

    run_dir: Path
    frozen: RunConfig
    """The configuration with which the run was last started."""


class CompletedConfig(NamedTuple):
    """The complete configuration of a run, with its plan and lines to print."""

    config: RunConfig
    stopped: StoppedRun | None = None
    """The run to resume; None: a new run."""
    plan: Plan | None = None
    """None: the run is not planned, or a plan is not possible."""
    notes: tuple[str, ...] = ()
    """Lines for the run's log, on the plan and on options without an effect."""
    data_lines: tuple[str, ...] = ()
    """Lines on the data that was read for the plan."""


def complete_config(job: Job) -> CompletedConfig:
    """Complete and check the configuration of the job's run; plan a run that this node begins."""
    if job.resume is not None:
        completed = CompletedConfig(*read_stopped_config(job))
    else:
        completed = CompletedConfig(build_new_config(job))
    config, is_new = completed.config, completed.stopped is None
    if is_secondary_node() and is_new and config.plan is PlanMode.check:
        # Check the data here too: with bad data, this node would wait for a run that never starts.
        read_loads(config, finished=reused_phases(config))
    is_planned_here = (is_new or job.is_plan) and not is_secondary_node()
    if config.launcher.dry_run or not is_planned_here:
        return completed
    with restrict_plans_to_share(config.hardware, job.at_a_time):
        return plan_config(completed, job)


def build_new_config(job: Job) -> RunConfig:
    """Return the configuration of a new run, without the choices of its plan.

    Raises:
        ConfigError: if a value is wrong, or an override has no effect.
    """
    cfg = job.cfg
    if (from_run := OmegaConf.select(cfg, "from_run")) is not None:
        source = expand_user_path(str(from_run), key="from_run").resolve()
        copy_keys_of_source_run(cfg, source, finished_phases(source), job.overrides)
    config = drop_shares_of_absent_phases(to_run_config(apply_auto_hardware(cfg, find_hardware)))
    if config.data.source is Source.local and not any(
        "data.size=" in word for word in job.overrides
    ):
        # A data.size that an experiment sets for its own data does not apply to a user's files.
        config = replace(config, data=replace(config.data, size=0))
    refuse_secret_values(config, os.environ)
    refuse_unread_keys(config, job.overrides)
    asked, (key, model) = config.data.template, tokenizer_base(config)
    downloads = not (job.is_plan or config.launcher.dry_run)
    template = choose_template(asked, key, model, downloads=downloads)
    if config.from_run is not None and job.folder is None:
        for line in describe_differences_from_source(config):
            build_console(is_main=True, log_every=1).say(line)
    if asked is Template.auto and not config.launcher.dry_run:
        for line in describe_template(template, key, model):
            build_console(is_main=True, log_every=1).say(line)
    data = replace(config.data, template=template)
    config = replace(config, data=data, rewards=seal_judges(config.rewards))
    for complete in hooks_of("jobs", "complete_config"):
        config = complete(config, in_sweep=job.folder is not None)
    return config


def read_stopped_config(job: Job) -> tuple[RunConfig, StoppedRun]:
    """Read the run to resume; overrides may change how it is started, not what it computes."""
    # Resolve the link runs/latest now: it may point to another run before this run ends.
    run_dir = expand_user_path(str(job.resume), key="resume").resolve()
    frozen = load_frozen_config(run_dir)
    # In a resumed run, auto stands for the template with which the run was started.
    if OmegaConf.select(job.cfg, "data.template") == Template.auto:
        job.cfg.data.template = frozen.data.template.value
    config = apply_resume_overrides(frozen, job.cfg, job.overrides)
    refuse_secret_values(config, os.environ)
    if config.plan is not PlanMode.only:
        check_ranks_started(config)
        check_ranks_can_start(config)
    elif not job.is_plan:
        raise ConfigError(
            f"resume={run_dir}: plan=only made this folder, and no run began in it; "
            "add plan=check to begin the run"
        )
    return config, StoppedRun(run_dir, frozen)


def plan_config(completed: CompletedConfig, job: Job) -> CompletedConfig:
    """Check what the phases need, count the data, plan, and apply the plan's choices.

    Raises:
        RlhfError: if a phase would refuse the data or a model, or the plan does not fit.
    """
    config, loads = completed.config, None
    data_lines: list[str] = []
    if not job.is_plan:
        config = replace_rank_counts(config)
    elif rank_from_environment() is not None:
        raise ConfigError(
            "plan=only: the ranks have been started; start launch.py without torchrun"
        )
    finished = reused_phases(config)
    check_before_start(config, finished=finished)
    if config.plan is PlanMode.check and lacks_rates(config.hardware):
        from rlhf.jobs.measure_cpu import measure_cpu  # imports torch

        measure_cpu()
    if config.plan is not PlanMode.off:
        loads, data_lines = read_loads(config, finished=finished)
    config, plan, notes = plan_and_configure(config, loads, finished=finished)
    if not job.is_plan:
        check_ranks_can_start(config)
    return CompletedConfig(config, completed.stopped, plan, notes, tuple(data_lines))
