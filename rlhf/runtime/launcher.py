"""Start the ranks of a run from its frozen configuration."""

from __future__ import annotations

import gc
import logging
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlhf.base.command import wait_for_exit
from rlhf.base.errors import INTERRUPTED, LostRankError, RlhfError
from rlhf.base.safe_text import sanitize_for_terminal
from rlhf.config.freeze import write_frozen_config
from rlhf.config.schema.run import LauncherConfig, RunConfig
from rlhf.run.console import Console
from rlhf.run.results import read_objective
from rlhf.runtime import worker
from rlhf.runtime.launch_mode import (
    LaunchMode,
    Program,
    find_slurm_task,
    launch_commands,
    launch_mode,
    read_whole_number,
    rendezvous_address,
)
from rlhf.runtime.out_of_memory import OutOfMemoryError, with_less_memory
from rlhf.runtime.rank import Failure, FailureKind, find_first_failure, report_to_agent, run_rank
from rlhf.runtime.rank_output import describe_rank
from rlhf.runtime.rendezvous import (
    Rendezvous,
    ignores_job_signals,
    num_cores_per_rank,
    rank_from_environment,
)

JOIN_MINUTES = 15  # time limit for the nodes of a SLURM job to connect


def start_ranks(
    config: RunConfig,
    run_dir: Path | None,
    script: str,
    make_context: Callable[[Path], AbstractContextManager[object]] = nullcontext,
) -> float | None:
    """Run all phases of the run frozen in ``run_dir``; return its objective.

    A process that was itself started as a rank joins the other ranks. ``script`` is the path of
    launch.py, which the DeepSpeed launcher runs on every node. If ``run_dir`` is None, another node
    leads the run: this node's ranks get the directory from rank 0, and None is returned.
    The process that leads the run enters ``make_context(run_dir)`` while the phases run.

    Raises:
        RlhfError: if a rank refused the run, with its message, or if a rank was lost.
    """
    mode = launch_mode(config, os.environ) if rank_from_environment() is None else None
    leads = mode is not LaunchMode.hostfile  # with a hostfile, rank 0 leads on the first node
    try:
        with make_context(run_dir) if run_dir is not None and leads else nullcontext():
            return _start_by_mode(config, run_dir, script, mode)
    except OutOfMemoryError as error:
        smaller = with_less_memory(config)
        if smaller is None or run_dir is None or mode not in {LaunchMode.process, LaunchMode.node}:
            raise
        reason = str(error).partition(". ")[0]
    sys.stderr.write(f"{reason}; continuing with smaller micro-batches\n")
    write_frozen_config(smaller, run_dir)
    if mode is LaunchMode.node:  # new processes do not hold the memory of the old ranks
        return start_ranks(smaller, run_dir, script, make_context)
    return _continue_in_new_process(run_dir, script)


def _continue_in_new_process(run_dir: Path, script: str) -> float | None:
    """Resume the run in a new process, and return the objective.

    Hooks, pinned memory and buffers of the failed attempt's engines would stay in this process.

    Raises:
        RlhfError: if the new process fails; that process has printed why.
    """
    gc.collect()  # frees the failed attempt's models; empty_cache then frees their GPU memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        _run_command([sys.executable, script, f"resume={run_dir}", "trust_run=true"])
    except SystemExit as end:
        raise RlhfError(f"the run in {run_dir} failed again, see its error above") from end
    return read_objective(run_dir)


def _start_by_mode(
    config: RunConfig, run_dir: Path | None, script: str, mode: LaunchMode | None
) -> float | None:
    if mode is LaunchMode.process:
        assert run_dir is not None
        return worker.run_worker(run_dir, begun=config)
    if mode is None:
        run_rank(run_dir, build_stderr_reporter())
    else:
        program = Program(sys.executable, script, [f"resume={run_dir}", "trust_run=true"])
        (command,) = launch_commands(config, program, os.environ)
        console = Console(quiet=run_dir is None)
        console.say(f"starting: {shlex.join(command)}")
        if mode is LaunchMode.hostfile:
            _run_command(command)
        else:
            _spawn_ranks(config, run_dir, mode)
    return None if run_dir is None else read_objective(run_dir)


def join_started_ranks() -> None:
    """Run this process as one of the started ranks; rank 0 sends it the run directory."""
    run_rank(None, build_stderr_reporter())


def publish_refusal(reason: str) -> None:
    """As rank 0, send the other started ranks the reason why there is no run."""
    # ``on_loss`` is not needed: ranks monitor each other only after they have agreed on a run.
    Rendezvous(lambda _: None).publish_refusal(reason)


def build_stderr_reporter() -> Callable[[Failure], None]:
    """Return a function that prints on stderr why this rank ends, except after a traceback.

    The first rank of each node prints on the terminal; the others do so only if they lost that
    rank.
    """
    terminal = os.dup(2)  # a copy: stderr becomes a file, and DeepSpeed redirects it for seconds
    rank, local_rank = (read_whole_number(os.environ, each) for each in ("RANK", "LOCAL_RANK"))

    def print_failure(failure: Failure) -> None:
        report_to_agent(failure)
        is_first = local_rank == 0 or failure.message.startswith(f"rank {rank - local_rank} on ")
        if failure.kind is not FailureKind.crashed:
            line = f"error: {sanitize_for_terminal(failure.message)}\n"
            os.write(terminal if is_first else 2, line.encode())

    return print_failure


def _run_command(command: list[str]) -> None:
    """Run ``command`` until it ends; if it fails, raise SystemExit with its exit code."""
    if code := wait_for_exit(subprocess.Popen(command)):
        raise SystemExit(code)


def _spawn_ranks(config: RunConfig, run_dir: Path | None, mode: LaunchMode) -> None:
    """Start the ranks of this node with torchrun's agent and wait for them."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # A rank's libraries read the number of threads from the environment when they load.
    os.environ["OMP_NUM_THREADS"] = str(num_cores_per_rank(config.hardware))
    # The agent would print a page about a failed rank; the rank's own message is enough.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = _rendezvous_options(config.launcher, mode)
    if ignores_job_signals():
        # SIGTERM must not end the run: submitit requeues the job at the signal that follows.
        options["signals_to_handle"] = "SIGINT"
    patience = shutdown_seconds(config.checkpoint.grace_seconds)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(patience))
    with TemporaryDirectory(prefix="rlhf-") as folder:
        launch = elastic_launch(
            LaunchConfig(
                min_nodes=config.hardware.nodes,
                max_nodes=config.hardware.nodes,
                nproc_per_node=config.hardware.ranks_per_node,
                max_restarts=0,
                start_method="spawn",
                logs_specs=DefaultLogsSpecs(log_dir=folder),  # else the agent leaves a folder
                **options,
            ),
            sys.executable,
        )
        rank_arguments = [folder, os.getpid(), *([] if run_dir is None else [run_dir])]
        try:
            launch("-u", "-m", "rlhf.runtime.rank", *map(str, rank_arguments))
        except SignalException as error:
            raise KeyboardInterrupt from error
        except ChildFailedError as error:
            if have_stopped([end.exitcode for end in error.failures.values()]):
                raise KeyboardInterrupt from error
            _raise_cause(error.failures, run_dir)
        except DistError as error:
            address, port = rendezvous_address(config.launcher, os.environ)
            raise RlhfError(
                f"hardware.nodes={config.hardware.nodes}: the job's tasks did not meet at "
                f"{address}:{port} in {JOIN_MINUTES} minutes; srun must start one task on each "
                "node, and launcher.master_port must be free"
            ) from error


def have_stopped(exit_codes: Collection[int]) -> bool:
    """Return True if the ranks stopped after a step; the agent sends SIGTERM to slower ranks."""
    return INTERRUPTED in exit_codes and {*exit_codes} <= {INTERRUPTED, -signal.SIGTERM}


def shutdown_seconds(grace_seconds: float) -> float:
    """Return how long the agent waits for ranks after SIGTERM before it kills them.

    The agent forwards SIGTERM; ranks write a checkpoint. In a SLURM job ranks ignore SIGTERM, and
    the agent sends it only to the remaining ranks after one has failed.
    """
    return 5 if ignores_job_signals() else grace_seconds + 5


def _rendezvous_options(launcher: LauncherConfig, mode: LaunchMode) -> dict[str, Any]:
    """Return torchrun's options on where ranks connect: a SLURM job's first node, or this node."""
    if mode is not LaunchMode.slurm:
        return {"run_id": uuid.uuid4().hex, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    task = find_slurm_task(os.environ)
    assert task is not None
    address, port = rendezvous_address(launcher, os.environ)
    return {
        "run_id": f"slurm-{os.environ.get('SLURM_JOB_ID')}",
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{address}:{port}",
        "rdzv_configs": {"rank": task.number, "timeout": JOIN_MINUTES * 60},
    }


def _raise_cause(ends: Mapping[int, Any], run_dir: Path | None) -> None:
    """Raise an error that explains why the ranks of this node ended.

    Raises:
        LostRankError: if a rank crashed, lost the others or was ended by a signal.
        RlhfError: with the message of the rank that refused the run, ran out of memory or hung.
        RuntimeError: if a rank failed before it could report why.
    """
    failure = find_first_failure(ends.values())
    if failure is not None and failure.kind is FailureKind.out_of_memory:
        raise OutOfMemoryError(failure.message)
    if failure is not None and failure.kind in {FailureKind.refused, FailureKind.stuck}:
        raise RlhfError(failure.message)
    if failure is not None and failure.kind is FailureKind.crashed:
        raise LostRankError(failure.message)
    signals = {rank: end.signal_name() for rank, end in ends.items() if end.exitcode < 0}
    # Ranks that SIGTERM ended are not the cause: the agent ends the others after a failure.
    killed = {rank: name for rank, name in signals.items() if name != "SIGTERM"} or signals
    if killed and (failure is None or failure.kind is FailureKind.lost):
        way_out = f"; python launch.py resume={run_dir} continues the run" if run_dir else ""
        raise LostRankError(
            f"{_join_with_commas(describe_rank(rank, run_dir) for rank in killed)} was ended by "
            f"{_join_with_commas(set(killed.values()))}{way_out}"
        )
    if failure is not None and failure.kind is FailureKind.lost:
        raise LostRankError(failure.message)
    raise RuntimeError(f"rank {_join_with_commas(ends)} failed; see the error above")


def _join_with_commas(items: Iterable[int | str]) -> str:
    return ", ".join(map(str, sorted(items)))
