"""Compose one configuration with Hydra, write it to the run directory, and start the ranks."""

from __future__ import annotations

import rlhf.base  # noqa: F401 - first, as rlhf decides whether Python stores bytecode

# isort: split
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from rlhf.base.command import run_to_exit_code
from rlhf.base.errors import INTERRUPTED, RlhfError
from rlhf.base.foreign_errors import to_drive_error
from rlhf.base.program import name_commands
from rlhf.base.safe_text import sanitize_for_terminal
from rlhf.base.user_paths import relative_to_cwd
from rlhf.config.hydra_errors import explain_hydra_error
from rlhf.jobs.completion import complete_config
from rlhf.jobs.job import begin_run, plan_result, show_commands, show_plan
from rlhf.jobs.launch_command import Command, Job, parse_command, read_job, set_up_process
from rlhf.jobs.search import run_search
from rlhf.jobs.sweep_jobs import end_with_launcher, read_cap, run_job
from rlhf.report import at_end
from rlhf.runtime.rendezvous import is_secondary_node, rank_from_environment

ROOT = Path(__file__).parent


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Run the job of the composed ``cfg``; return its objective to Hydra's sweeper."""
    job = read_job(cfg)
    try:
        return run(job)
    except RlhfError as error:
        if job.folder is not None:
            raise  # the sweep's other jobs still run, and Hydra reports which job failed
        raise SystemExit(report_error(error)) from error


def run(job: Job) -> float | None:
    """Start or resume the job's run, or print its plan or its commands; return its objective."""
    script, run_dir = str(relative_to_cwd(Path(__file__))), None
    if job.at_a_time is not None:
        end_with_launcher()
    completed = complete_config(job)
    config = completed.config
    if config.launcher.dry_run:
        show_commands(config, job, script)
        return None
    if is_secondary_node():  # another node plans the run, and freezes it
        if job.is_plan:
            return None
    elif job.is_plan:
        return show_plan(completed, job)
    else:
        config, run_dir = begin_run(completed, job)
    try:
        if run_dir is not None and job.at_a_time is not None:
            cap = read_cap(HydraConfig.get(), config.hardware, job.at_a_time)
            return run_job(config.hardware, run_dir, script, cap, jobs=job.at_a_time)
        from rlhf.runtime import launcher  # imports torch; a wrong configuration has ended before

        return launcher.start_ranks(config, run_dir, script, at_end.report_on_exit)
    except KeyboardInterrupt:
        if run_dir is None:
            raise
        advice = name_commands(f"python launch.py resume={run_dir} continues the run")
        print(f"interrupted; {advice}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def report_error(error: RlhfError) -> int:
    """Print ``error``, and send it to ranks that wait for rank 0; return the exit code."""
    print(f"error: {sanitize_for_terminal(str(error))}", file=sys.stderr)
    try:
        leads_others = rank_from_environment() == 0
    except RlhfError:  # the reported error is that RANK itself is wrong
        leads_others = False
    if leads_others:
        from rlhf.runtime import launcher

        launcher.publish_refusal(str(error))
    return error.exit_code


def start_jobs(command: Command) -> None:
    """Start the jobs or trials of a command; after a sweep, write a comparison of its jobs."""
    try:
        if command.search is None:
            import rlhf.jobs.sweeper  # noqa: F401 - registers itself with Hydra; loads its plugins

            main()
        else:
            run_search(command.search, ROOT / "conf", str(relative_to_cwd(Path(__file__))))
    finally:
        if command.folder is not None:
            at_end.compare_jobs(command.folder)


def start() -> int:
    """Run the launcher, or a rank that torchrun or deepspeed started; return the exit code."""
    try:
        set_up_process()
        if "--json" in sys.argv[1:]:
            return run_to_exit_code(lambda: plan_result(sys.argv[1:], ROOT / "conf"), as_json=True)
        leads = rank_from_environment() in {None, 0}
        with parse_command(sys.argv[1:], ROOT / "sweeps", leads=leads) as command:
            sys.argv[1:] = command.words
            if leads or command.search is not None:
                start_jobs(command)
            else:
                from rlhf.runtime import launcher

                launcher.join_started_ranks()  # the run that rank 0 composes and freezes
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except RlhfError as error:
        return report_error(error)
    except Exception as error:
        if (explained := explain_hydra_error(error, sys.argv[1:]) or to_drive_error(error)) is None:
            raise
        return report_error(explained)
    return 0


if __name__ == "__main__":
    sys.exit(start())
