"""Check and plan one job, and write its configuration for the ranks; or print its plan."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from rlhf.base.errors import ConfigError
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import PlanMode, Source, Template
from rlhf.config.effects import refuse_unread_keys
from rlhf.config.freeze import (
    FROZEN,
    apply_resume_overrides,
    batch_division_changes,
    load_frozen_config,
    restore_stored_sizes,
    to_run_config,
    write_command,
    write_frozen_config,
)
from rlhf.config.machine_rates import lacks_rates
from rlhf.config.roles import tokenizer_base
from rlhf.config.run_dir import create_run_folder, lock_run_dir, make_run_dir, refuse_existing_run
from rlhf.config.schema.data import drop_shares_of_absent_phases
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.run import RunConfig
from rlhf.config.validation import refuse_secret_values
from rlhf.data.encoding import is_plain_template
from rlhf.jobs.from_run import copy_keys_of_source_run, describe_changes
from rlhf.jobs.input_files import check_inputs, write_inputs
from rlhf.jobs.launch_command import Job, notices
from rlhf.jobs.read_loads import read_loads
from rlhf.jobs.sweep_jobs import open_log
from rlhf.jobs.this_machine import apply_auto_hardware, is_hardware_auto, this_machine
from rlhf.models.tokenizers import tokenizer_place
from rlhf.options import modules_of
from rlhf.plan.decide import plan_and_configure
from rlhf.plan.plan_tables import plan_as_json, plan_summary, render_plan
from rlhf.run.console import Console, build_config_tree, build_console
from rlhf.run.results import PLAN, finished_phases, reused_phases, write_json
from rlhf.runtime.launch_mode import Program, launch_commands
from rlhf.runtime.rendezvous import (
    adopt_started_ranks,
    check_ranks_can_start,
    check_ranks_started,
    is_secondary_node,
    rank_from_environment,
)
from rlhf.runtime.start_checks import check_before_start


class StoppedRun(NamedTuple):
    """A run that was stopped, and that the job resumes."""

    run_dir: Path
    frozen: RunConfig
    """The configuration with which the run was last started."""


def config_of_job(job: Job) -> tuple[RunConfig, StoppedRun | None]:
    """Return the checked configuration of the job's run, and the run to resume, if any."""
    if job.resume is not None:
        return _read_stopped_config(job)
    config = _build_new_config(job)
    if is_secondary_node() and config.plan is PlanMode.check:
        # Check the data here too: this node would wait for a run that bad data keeps from starting.
        read_loads(config, finished=reused_phases(config))
    return config, None


def _build_new_config(job: Job) -> RunConfig:
    """Return the configuration of a new run; raise ConfigError for overrides without an effect."""
    cfg = job.cfg
    if (from_run := OmegaConf.select(cfg, "from_run")) is not None:
        source = expand_user_path(str(from_run), key="from_run").resolve()
        copy_keys_of_source_run(cfg, source, finished_phases(source), job.overrides)
    config = drop_shares_of_absent_phases(to_run_config(apply_auto_hardware(cfg, this_machine)))
    if config.data.source is Source.local and not any(
        "data.size=" in word for word in job.overrides
    ):
        # A size that an experiment sets for its own data does not stand for a user's files.
        config = replace(config, data=replace(config.data, size=0))
    refuse_secret_values(config, os.environ)
    refuse_unread_keys(config, job.overrides)
    asked, (key, model) = config.data.template, tokenizer_base(config)
    downloads = not (job.is_plan or config.launcher.dry_run)
    template = choose_template(asked, key, model, downloads=downloads)
    if config.from_run is not None and job.folder is None:
        for line in describe_changes(config):
            build_console(is_main=True, log_every=1).say(line)
    if asked is Template.auto and not config.launcher.dry_run:
        for line in describe_template(template, key, model):
            build_console(is_main=True, log_every=1).say(line)
    config = replace(config, data=replace(config.data, template=template))
    for module in modules_of("jobs"):
        config = module.JOBS.complete_config(config, in_sweep=job.folder is not None)
    return config


def _read_stopped_config(job: Job) -> tuple[RunConfig, StoppedRun]:
    """Read the run to resume; overrides may change how it is started, not what it computes."""
    # Resolve the link runs/latest now: it may point to another run before this run ends.
    run_dir = expand_user_path(str(job.resume), key="resume").resolve()
    frozen = load_frozen_config(run_dir)
    # auto stands for the template that the run was started with.
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


def begin_run(config: RunConfig, job: Job, stopped: StoppedRun | None) -> tuple[RunConfig, Path]:
    """Write the configuration of a new or resumed run; return it and the run directory."""
    if stopped is None:
        return _begin_new_run(config, job)
    if changes := batch_division_changes(stopped.frozen, config):
        text = "the same batches, but sums round differently: no longer equal bit for bit"
        sys.stderr.write(f"resume with {', '.join(changes)}: {text}\n")
    check_inputs(config, stopped.run_dir)
    with lock_run_dir(stopped.run_dir):  # the configuration of a run in progress must not change
        write_frozen_config(config, stopped.run_dir)
    return config, stopped.run_dir


def _begin_new_run(config: RunConfig, job: Job) -> tuple[RunConfig, Path]:
    """Check and plan a new run, and write its planned configuration to a new run directory.

    If the job may continue an unfinished run with the same configuration, that run is resumed.
    """
    config, loads = adopt_started_ranks(config), None
    finished = reused_phases(config)
    check_before_start(config, finished=finished)
    if config.plan is PlanMode.check:
        if lacks_rates(config.hardware):
            from rlhf.jobs.measure_cpu import measure_cpu  # imports torch

            measure_cpu()
        loads = read_loads(config, finished=finished).loads
    config, plan, notes = plan_and_configure(config, loads, finished=finished)
    check_ranks_can_start(config)
    now, continues = datetime.now(), job.continues
    run_dir = make_run_dir(config, job_dir=job.folder, now=now, continues=continues)
    may_be_same = continues or (job.folder is not None and config.run_dir is None)
    with lock_run_dir(run_dir):  # another command may begin a run in the same folder
        refuse_existing_run(run_dir, config if may_be_same else None)
        if (run_dir / FROZEN).exists():
            config = restore_stored_sizes(load_frozen_config(run_dir), config)
            check_inputs(config, run_dir)
        else:
            write_inputs(config, run_dir)
        write_command(job.overrides, run_dir)
        if plan is not None:
            write_json(run_dir / PLAN, plan_as_json(plan))
        write_frozen_config(config, run_dir)  # last: without it the folder holds no run
    if plan is not None:
        notes = (*notes, f"plan: {plan_summary(plan)}")
    # A job of a sweep prints to a file instead of the terminal.
    screen = open_log(run_dir) if job.at_a_time is not None else nullcontext()
    with screen as file:
        console = Console(log_every=config.tracking.log_every, file=file)
        if config.tracking.show_config:
            console.show(build_config_tree(str(run_dir), asdict(config)))
        if is_hardware_auto():
            console.say(this_machine().notice)
        for note in (*notices, *notes):
            console.say(note)
    return config, run_dir


def show_plan(config: RunConfig, job: Job) -> float | None:
    """Print the plan's memory, time and cost, as one line in a sweep; return the planned hours.

    plan.json is written only if the command sets run_dir. A single plan that does not fit is an
    error, after it is printed.
    """
    if rank_from_environment() is not None:
        raise ConfigError(
            "plan=only: the ranks have been started; start launch.py without torchrun"
        )
    finished = reused_phases(config)
    check_before_start(config, finished=finished)
    loads, lines = read_loads(config, finished=finished)
    plan = plan_and_configure(config, loads, finished=finished).plan
    assert plan is not None, "plan=only has a plan, or was refused"
    if job.resume is None and config.run_dir is not None:
        write_json(
            create_run_folder(expand_user_path(config.run_dir, key="run_dir")) / PLAN,
            plan_as_json(plan),
        )
    console = build_console(is_main=True, log_every=config.tracking.log_every)
    if job.folder is not None:
        words = [word for word in job.overrides if word != "plan=only"]
        console.say(f"{' '.join(words)}: {plan_summary(plan)}")
    else:
        for line in lines:
            console.say(line)
        console.show(*render_plan(plan))
        if is_hardware_auto():
            console.say(this_machine().notice)
        if not plan.fits:
            raise ConfigError(f"plan=only: {plan.misfit_reason}")
    return plan.hours


def show_commands(config: RunConfig, job: Job, script: str) -> None:
    """Print the command that would start the ranks; one per node if a user starts each node."""
    if rank_from_environment() is not None:
        raise ConfigError("launcher.dry_run=true: the ranks have been started; remove this option")
    arguments = [word for word in job.overrides if "launcher.dry_run" not in word]
    program = Program(sys.executable, script, arguments)
    console = build_console(is_main=True, log_every=config.tracking.log_every)
    for command in launch_commands(config, program, os.environ):
        console.say(shlex.join(command))


ReadFile = Callable[[str], str | None]


def choose_template(asked: Template, key: str, model: ModelConfig, *, downloads: bool) -> Template:
    """Return chat or plain for data.template=auto; return any other template unchanged.

    The tokenizer is that of ``model``, the value of config key ``key``. If ``downloads``, the files
    of a hub tokenizer that is not on this machine are downloaded. If they cannot be read, auto is
    returned: the ranks will report the reason when they load the tokenizer.
    """
    if asked is not Template.auto:
        return asked
    place_key, place = tokenizer_place(model, key=key)
    has_template: bool | None = False  # a tokenizer that is trained on the run's own text
    if place is not None:
        folder = expand_user_path(place, key=place_key)
        read = partial(_read_hub_file, place, model.revision, downloads)
        has_template = _has_chat_template(
            partial(_read_local_file, folder) if folder.is_dir() else read
        )
    if has_template is None:
        return Template.auto
    return Template.chat if has_template else Template.plain


def describe_template(chosen: Template, key: str, model: ModelConfig) -> list[str]:
    """Return a line on the template chosen for data.template=auto; none for a new tokenizer."""
    place = tokenizer_place(model, key=key)[1]
    if place is None:
        return []
    said = {
        Template.chat: "has a chat template, so the model is trained and asked in it "
        "(data.template=plain: with Human: and Assistant:)",
        Template.plain: "has no chat template, so conversations have Human: and Assistant:",
        Template.auto: "is not on this machine; the run decides when it has it",
    }
    return [f"data.template={chosen}: the tokenizer of {place} {said[chosen]}"]


def _has_chat_template(read_file: ReadFile) -> bool | None:
    """Return True if the tokenizer has a chat template of its own; None: it cannot be read."""
    settings = read_file("tokenizer_config.json")
    template = read_file("chat_template.jinja")
    if settings is None and template is None:
        return None
    try:
        template = template or json.loads(settings or "{}").get("chat_template")
    except (ValueError, AttributeError):  # a damaged file
        return None
    # A tokenizer that a plain run saved has a template too, which renders the plain form.
    return bool(template) and not (isinstance(template, str) and is_plain_template(template))


def _read_local_file(folder: Path, name: str) -> str | None:
    path = folder / name
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _read_hub_file(place: str, revision: str | None, downloads: bool, name: str) -> str | None:
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(place, name, revision=revision, local_files_only=not downloads)
    except (OSError, ValueError):  # no such file, no network, no access, or no name of the hub
        return None
    return Path(file).read_text(encoding="utf-8")
