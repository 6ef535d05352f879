"""Compose one configuration, freeze it and start the ranks: the only Hydra app of this project."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlhf.checkpoint.results import finished_phases, taken_phases, write_json
from rlhf.config.choices import PlanMode, Reuse
from rlhf.config.completion import complete_value
from rlhf.config.freeze import (
    freeze,
    keep_command,
    load_frozen,
    refuse_changes,
    spread_changes,
    to_run_config,
    with_free_keys,
)
from rlhf.config.from_run import take_over
from rlhf.config.hydra_errors import explain, opened, refuse_flags
from rlhf.config.on_machine import is_auto, on_machine
from rlhf.config.rules.secrets import refuse_secret_values, refuse_secrets
from rlhf.config.rules.unread_keys import refuse_unread
from rlhf.config.run_dir import claim, make_run_dir, only_process
from rlhf.config.schema.run import RunConfig
from rlhf.config.search_command import search_of
from rlhf.config.sweep_command import SWEEPS, expanded, jobs_at_a_time, placed, without_leavings
from rlhf.cpu import cap_libraries, require_linux
from rlhf.drive_errors import refusal_of_drive
from rlhf.errors import ConfigError, RlhfError
from rlhf.lasting_output import outlast_output
from rlhf.planning.cpu_rates import lacks_rates
from rlhf.planning.decide import decide
from rlhf.planning.plan_tables import PLAN, as_json, summary, tables
from rlhf.report import compare
from rlhf.runtime.launch_mode import Program, launch_commands, script_name
from rlhf.runtime.read_loads import read_loads
from rlhf.runtime.rendezvous import (
    check_machine,
    check_started,
    drop_pod_variables,
    is_secondary_node,
    started_rank,
    with_started_ranks,
    without_local_rank,
)
from rlhf.runtime.search import run_search
from rlhf.runtime.sweep_jobs import end_with_launcher, end_with_parent, run_job
from rlhf.runtime.this_machine import this_machine
from rlhf.safe_text import for_terminal, print_traceback
from rlhf.tracking.config_tree import config_tree
from rlhf.tracking.console import build_console
from rlhf.user_paths import user_path

ROOT = Path(__file__).parent
USER_ERROR = 2
INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended
# Hydra allows no config file under the plugin's own name; ours takes the nodes from `hardware`.
PRESETS = {"hydra/launcher=submitit_slurm": "hydra/launcher=slurm"}


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Run one job and return its objective to Hydra's sweeper."""
    try:
        return run(cfg)
    except RlhfError as error:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            raise  # the sweep's other jobs still run, and Hydra reports which job failed
        raise SystemExit(complain(error)) from error


def run(cfg: DictConfig) -> float | None:
    """Start the run that ``cfg`` describes, or resume the run that it names."""
    if (jobs := jobs_at_a_time()) is not None:
        end_with_launcher()
    if continues := cfg.get("resume") == "auto":
        cfg.resume = None
    is_new = cfg.get("resume") is None
    if OmegaConf.select(cfg, "launcher.dry_run") is True:
        show_commands(asked_config(cfg) if is_new else load_stopped(cfg)[0])
        return None
    if asks_for_plan(cfg):
        config = asked_config(cfg) if is_new else load_stopped(cfg)[0]
        return None if is_secondary_node() else show_plan(config, is_new=is_new)
    run_dir: Path | None = None
    if is_secondary_node():
        config = asked_config(cfg) if is_new else load_stopped(cfg)[0]
    elif is_new:
        config, run_dir = new_run(cfg, continues=continues)
    else:
        config, run_dir = stopped_run(cfg)
    script = script_name(Path(__file__))
    try:
        if run_dir is not None and jobs is not None:
            return run_job(config.hardware, run_dir, script, jobs=jobs)
        from rlhf.runtime import launcher  # imports torch; a wrong configuration has ended before

        return launcher.start(config, run_dir, script)
    except KeyboardInterrupt:
        if run_dir is None:
            raise
        print(f"interrupted; python launch.py resume={run_dir} continues the run", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def asked_config(cfg: DictConfig) -> RunConfig:
    """Return the configuration of a new run; refuse overrides that have no effect."""
    overrides = HydraConfig.get().overrides.task
    if cfg.get("from_run") is not None:
        source = user_path(str(cfg.from_run), key="from_run").resolve()
        take_over(cfg, source, finished_phases(source), overrides)
    config = to_run_config(on_machine(cfg, this_machine))
    refuse_secret_values(config, os.environ)
    refuse_unread(config, overrides)
    if config.reuse.phases is not Reuse.sweep:
        return config
    phases = Reuse.always if HydraConfig.get().mode is RunMode.MULTIRUN else Reuse.never
    return replace(config, reuse=replace(config.reuse, phases=phases))


def asks_for_plan(cfg: DictConfig) -> bool:
    """Return True if the command has plan=only."""
    return bool(OmegaConf.select(cfg, "plan") == PlanMode.only.value)


def new_run(cfg: DictConfig, *, continues: bool) -> tuple[RunConfig, Path]:
    """Check and plan ``cfg``, and write the planned configuration to a new run directory.

    With ``continues`` an unfinished run that has this configuration is resumed instead.
    """
    asked = with_started_ranks(asked_config(cfg))
    loads = None
    if asked.plan is PlanMode.check:
        if lacks_rates(asked.hardware):
            from rlhf.runtime.measure_cpu import measure_cpu  # imports torch

            measure_cpu()
        loads = read_loads(asked)
    config, plan, notes = decide(asked, loads, finished=taken_phases(asked))
    check_machine(config)
    job = HydraConfig.get()
    job_dir = Path(job.runtime.output_dir) if job.mode is RunMode.MULTIRUN else None
    run_dir = make_run_dir(config, job_dir=job_dir, now=datetime.now(), continues=continues)
    freeze(config, run_dir)
    keep_command(job.overrides.task, run_dir)
    console = build_console(is_main=True, log_every=config.tracking.log_every)
    if config.tracking.show_config:
        console.show(config_tree(str(run_dir), asdict(config)))
    if is_auto():
        console.say(this_machine().line)
    if plan is not None:
        write_json(run_dir / PLAN, as_json(plan))
        notes = (*notes, f"plan: {summary(plan)}")
    for note in notes:
        console.say(note)
    return config, run_dir


def show_plan(config: RunConfig, *, is_new: bool) -> float | None:
    """Print the plan's memory, time and cost, in a sweep as one line; return the hours.

    plan.json is written only if the command sets run_dir.
    """
    if started_rank() is not None:
        raise ConfigError(
            "plan=only: the ranks have been started; start launch.py without torchrun"
        )
    plan = decide(config, read_loads(config), finished=taken_phases(config)).plan
    assert plan is not None, "plan=only has a plan, or was refused"
    if is_new and config.run_dir is not None:
        write_json(claim(user_path(config.run_dir, key="run_dir")) / PLAN, as_json(plan))
    console = build_console(is_main=True, log_every=config.tracking.log_every)
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        words = [word for word in HydraConfig.get().overrides.task if word != "plan=only"]
        console.say(f"{' '.join(words)}: {summary(plan)}")
    else:
        console.show(*tables(plan))
        if is_auto():
            console.say(this_machine().line)
    return plan.hours


def stopped_run(cfg: DictConfig) -> tuple[RunConfig, Path]:
    """Load the run to resume, and write its configuration again with the new launch options."""
    config, run_dir = load_stopped(cfg)
    if changes := spread_changes(load_frozen(run_dir), config):
        text = "the same batches, but sums round differently: no longer equal bit for bit"
        print(f"resume with {', '.join(changes)}: {text}", file=sys.stderr)
    with only_process(run_dir):  # the configuration of a run in progress must not change
        freeze(config, run_dir)
    return config, run_dir


def load_stopped(cfg: DictConfig) -> tuple[RunConfig, Path]:
    """Read the run to resume: overrides may change how it is started, not what it computes."""
    # Resolved, because runs/latest may point to another run before this one ends.
    run_dir = user_path(str(cfg.resume), key="resume").resolve()
    frozen, overrides = load_frozen(run_dir), HydraConfig.get().overrides.task
    refuse_changes(frozen, cfg, overrides)
    config = with_free_keys(frozen, cfg, overrides)
    refuse_secret_values(config, os.environ)
    if config.plan is not PlanMode.only:
        check_started(config)
        check_machine(config)
    elif not asks_for_plan(cfg):
        raise ConfigError(
            f"resume={run_dir}: plan=only made this folder, and no run began in it; "
            "add plan=check to begin the run"
        )
    return config, run_dir


def show_commands(config: RunConfig) -> None:
    """Print the command that would start the ranks; one per node if users start them by hand."""
    if started_rank() is not None:
        raise ConfigError("launcher.dry_run=true: the ranks have been started; remove this option")
    words = [o for o in HydraConfig.get().overrides.task if "launcher.dry_run" not in o]
    program = Program(sys.executable, script_name(Path(__file__)), words)
    for command in launch_commands(config, program, os.environ):
        build_console(is_main=True, log_every=1).say(shlex.join(command))


def complain(error: RlhfError) -> int:
    """Print ``error``, and send it to ranks that wait for rank 0; return the exit code."""
    print(f"error: {for_terminal(str(error))}", file=sys.stderr)
    if started_rank() == 0:
        from rlhf.runtime import launcher

        launcher.refuse(str(error))
    return USER_ERROR


def conclude(words: Sequence[str]) -> None:
    """Print and write what the jobs of a sweep have reached, if its folder is one of ours."""
    for word in words:
        folder = Path(word.removeprefix("hydra.sweep.dir="))
        if folder.parent == SWEEPS and any(folder.rglob("config.yaml")):
            compare([folder])


def launch() -> int:
    """Run the launcher, or a rank that torchrun or deepspeed started; return the exit code."""
    outlast_output()
    sys.excepthook = print_traceback
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra re-raises exceptions, which are explained below
    os.environ["PYTHONSAFEPATH"] = "1"  # no child imports a json.py of the current directory
    # libgomp's threads would spin for milliseconds, which is much slower beside other programs.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    end_with_parent()
    sys.argv[1:] = asked = [opened(PRESETS.get(w, w)) for w in without_local_rank(sys.argv[1:])]
    if (advice := drop_pod_variables()) is not None:
        print(advice, file=sys.stderr)
    try:
        require_linux()
        refuse_secrets(asked, os.environ)
        refuse_flags(asked)
        complete_value(asked, os.environ, ROOT / "sweeps")
        cap_libraries()
        if (search := search_of(asked, ROOT / "sweeps")) is not None:
            try:
                run_search(search, ROOT / "conf", script_name(Path(__file__)))
            finally:
                conclude([str(search.folder)])
        elif started_rank() in {None, 0}:
            with without_leavings(expanded(asked, ROOT / "sweeps")) as words:
                sys.argv[1:] = placed(words, asked)
                try:
                    main()
                finally:
                    conclude(sys.argv[1:])
        else:
            from rlhf.runtime import launcher

            launcher.join()  # the run that rank 0 composes and freezes
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except RlhfError as error:
        return complain(error)
    except Exception as error:
        if (explained := explain(error, sys.argv[1:]) or refusal_of_drive(error)) is None:
            raise
        return complain(explained)
    return 0


if __name__ == "__main__":
    sys.exit(launch())
