"""Write the configuration of a job's run for its ranks, or print the run's plan or commands."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from rlhf.base.atomic import write_text_atomically
from rlhf.base.command import Result
from rlhf.base.errors import USER_ERROR, ConfigError
from rlhf.base.refusals import refusal_as_json
from rlhf.base.stored_files import PLAN
from rlhf.base.user_paths import expand_user_path, read_user_text
from rlhf.config.freeze import (
    FROZEN,
    batch_division_changes,
    keep_reduced_sizes,
    load_frozen_config,
    read_command,
    write_command,
    write_frozen_config,
)
from rlhf.config.hydra_parts import SEARCH_PATH, own_options_in_use
from rlhf.config.more_steps import STEPS
from rlhf.config.run_dir import (
    clear_untrained_run,
    create_run_folder,
    lock_run_dir,
    make_run_dir,
    refuse_existing_run,
)
from rlhf.config.schema.keys import store_whole_paths
from rlhf.config.schema.run import RunConfig
from rlhf.jobs.completion import CompletedConfig, complete_config
from rlhf.jobs.input_files import check_input_hashes, write_input_hashes
from rlhf.jobs.launch_command import Job, compose_job
from rlhf.jobs.sweep_command import is_sweep
from rlhf.jobs.sweep_jobs import open_log
from rlhf.jobs.this_machine import find_hardware, is_hardware_auto
from rlhf.plan.plan_tables import plan_as_json, plan_summary, render_plan
from rlhf.run.console import Console, build_config_tree
from rlhf.run.results import write_json
from rlhf.runtime.launch_mode import Program, launch_commands
from rlhf.runtime.rendezvous import rank_from_environment


def begin_run(completed: CompletedConfig, job: Job) -> tuple[RunConfig, Path]:
    """Write the configuration of a new or resumed run; return it and the run directory."""
    completed = completed._replace(config=store_whole_paths(completed.config))
    config, stopped, plan = completed.config, completed.stopped, completed.plan
    if stopped is None:
        return _begin_new_run(completed, job)
    if changes := batch_division_changes(stopped.frozen, config):
        text = "batches stay the same, but sums round differently: no longer equal bit for bit"
        sys.stderr.write(f"resume with {', '.join(changes)}: {text}\n")
    check_input_hashes(config, stopped.run_dir)
    with lock_run_dir(stopped.run_dir):  # the configuration of a run in progress must not change
        if config.ppo.steps != stopped.frozen.ppo.steps:
            from rlhf.run.phase_state import reopen_ppo

            reopen_ppo(stopped.run_dir, config)
            if words := read_command(stopped.run_dir):
                words = [word for word in words if not word.startswith(f"{STEPS}=")]
                write_command([*words, f"{STEPS}={config.ppo.steps}"], stopped.run_dir)
            if plan is not None:
                write_json(stopped.run_dir / PLAN, plan_as_json(plan))
                sys.stderr.write(f"plan: {plan_summary(plan)}\n")
        write_frozen_config(config, stopped.run_dir)
    return config, stopped.run_dir


def _begin_new_run(completed: CompletedConfig, job: Job) -> tuple[RunConfig, Path]:
    """Write a new run's configuration to a new run directory.

    If the job may continue an unfinished run with the same configuration, that run is resumed.
    """
    config, plan, notes = completed.config, completed.plan, completed.notes
    run_dir = make_run_dir(config, job_dir=job.folder, now=datetime.now(), continues=job.continues)
    may_be_same = job.continues or (job.folder is not None and config.run_dir is None)
    with lock_run_dir(run_dir):  # another command may begin a run in the same folder
        refuse_existing_run(run_dir, config if may_be_same else None)
        clear_untrained_run(run_dir)
        if (run_dir / FROZEN).exists():
            config = keep_reduced_sizes(load_frozen_config(run_dir), config)
            check_input_hashes(config, run_dir)
        else:
            write_input_hashes(config, run_dir)
        write_command(job.overrides, run_dir)
        for name, option in own_options_in_use(job.overrides):
            (target := run_dir / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(target, read_user_text(option))
        if plan is not None:
            write_json(run_dir / PLAN, plan_as_json(plan))
            notes = (*notes, f"plan: {plan_summary(plan)}")
        write_frozen_config(config, run_dir)  # last: only this file makes the folder a run
    # A job of a sweep prints to a file instead of the terminal.
    screen = open_log(run_dir) if job.at_a_time is not None else nullcontext()
    with screen as file:
        console = Console(log_every=config.tracking.log_every, file=file)
        if config.tracking.show_config:
            console.show(build_config_tree(str(run_dir), asdict(config)))
        if is_hardware_auto():
            console.say(find_hardware().choice_line)
        for note in notes:
            console.say(note)
    return config, run_dir


def show_plan(completed: CompletedConfig, job: Job) -> float | None:
    """Print the plan's memory, time and cost, as one line in a sweep; return the planned hours.

    plan.json is written only if the command sets run_dir. If a single plan does not fit, it is
    printed, and then a ConfigError is raised.
    """
    config, plan = completed.config, completed.plan
    assert plan is not None, "plan=only has a plan, or was refused"
    if job.resume is None and config.run_dir is not None:
        folder = create_run_folder(expand_user_path(config.run_dir, key="run_dir"))
        write_json(folder / PLAN, plan_as_json(plan))
    console = Console(log_every=config.tracking.log_every)
    if job.folder is not None:
        unshown = ("plan=only", SEARCH_PATH)
        words = [word for word in job.overrides if not word.startswith(unshown)]
        console.say(f"{' '.join(words)}: {plan_summary(plan)}")
    else:
        for line in completed.data_lines:
            console.say(line)
        console.show(*render_plan(plan))
        if is_hardware_auto():
            console.say(find_hardware().choice_line)
        if not plan.fits:
            raise ConfigError(f"plan=only: {plan.misfit_reason}")
    return plan.hours


def plan_result(words: Sequence[str], conf: Path) -> Result:
    """Return the plan that ``plan=only --json`` prints, with an error in it if it does not fit.

    Raises:
        ConfigError: if the command ``words`` do not ask for the plan of one run.
    """
    words = [word for word in words if word != "--json"]
    if "plan=only" not in words or is_sweep(words) or any("dry_run=" in word for word in words):
        raise ConfigError(
            "--json: launch.py prints JSON only for the plan of one run; add plan=only, and remove "
            "-m and launcher.dry_run; for the result of a run, python -m rlhf.report RUN_DIR --json"
        )
    with compose_job(words, conf) as job:
        completed = complete_config(job)
        assert completed.plan is not None, "plan=only has a plan, or was refused"
        content = plan_as_json(completed.plan)
        try:
            show_plan(completed, job)
        except ConfigError as error:  # it does not fit
            return Result(content | {"error": refusal_as_json(error)}, USER_ERROR)
    return Result(content)


def show_commands(config: RunConfig, job: Job, script: str) -> None:
    """Print the command that starts the ranks, or a command per node if users start each node."""
    if rank_from_environment() is not None:
        raise ConfigError("launcher.dry_run=true: the ranks have been started; remove this option")
    arguments = [word for word in job.overrides if "launcher.dry_run" not in word]
    program = Program(sys.executable, script, arguments)
    console = Console(log_every=config.tracking.log_every)
    for command in launch_commands(config, program, os.environ):
        console.say(shlex.join(command))
