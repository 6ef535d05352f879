"""From a frozen configuration to running ranks."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf.config.schema import RunConfig
from rlhf.errors import RlhfError
from rlhf.runtime import worker
from rlhf.runtime.commands import (
    Program,
    Way,
    in_shell,
    launch_commands,
    launch_way,
    meeting_point,
    slurm_task,
)
from rlhf.runtime.distributed import (
    Meeting,
    cores_of_rank,
    ignores_job_signals,
    started_rank,
)
from rlhf.runtime.rank import Failure, Kind, be_rank, read_failure
from rlhf.tracking.console import build_console

JOIN_MINUTES = 15  # in which the nodes of a SLURM job must meet


def start(config: RunConfig, run_dir: Path | None, script: str) -> float | None:
    """Run all phases of the run frozen in ``run_dir``; returns its objective.

    A process that was itself started as a rank joins the others. ``script`` is launch.py, for those
    that are started through it. Without ``run_dir`` this node only takes part, and its ranks are
    told; then there is no objective.

    Raises:
        RlhfError: whatever a rank refused, with its message, or which rank was lost.
    """
    way = launch_way(config, os.environ) if started_rank() is None else None
    if way is Way.process:
        assert run_dir is not None
        return worker.run(run_dir)
    if way is None:
        be_rank(run_dir, complainer())
    else:
        program = Program(sys.executable, script, [f"resume={run_dir}"])
        (command,) = launch_commands(config, program, os.environ)
        console = build_console(is_main=run_dir is not None, log_every=1)
        console.say(f"starting: {in_shell(command)}")
        if way is Way.hostfile:
            _call(command)
        else:
            _spawn(config, run_dir, way)
    if run_dir is None:
        return None
    return float(json.loads((run_dir / "result.json").read_text())["objective"])


def join() -> None:
    """Be one of the started ranks, of the run that rank 0 tells of."""
    be_rank(None, complainer())


def refuse(reason: str) -> None:
    """Be the first of the started ranks, and tell the others why there is no run."""
    Meeting(_ignore).refuse(reason)


def _ignore(loss: str) -> None:
    """Ranks watch one another from when they agree on a run."""


def complainer() -> Callable[[Failure], None]:
    """What says on the terminal why this rank ends."""
    terminal = os.dup(2)  # DeepSpeed turns stderr away for seconds, while it tries compilers

    def complain(failure: Failure) -> None:
        if failure.kind is not Kind.crashed:
            os.write(terminal, f"error: {failure.message}\n".encode())

    return complain


def _call(command: list[str]) -> None:
    """Run another launcher to its end; its exit code is ours."""
    process = subprocess.Popen(command)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()  # it was interrupted, too, and ends what it has started elsewhere
        raise
    if code:
        raise SystemExit(code)


def _spawn(config: RunConfig, run_dir: Path | None, way: Way) -> None:
    """Start the ranks of this node with torchrun's agent and wait for them."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Threads of a rank are fixed before its libraries load, and inherited through the environment.
    os.environ["OMP_NUM_THREADS"] = str(cores_of_rank(config))
    # The agent reports a failed rank in a page of its own; the rank's own words are enough.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = _slurm_options(config) if way is Way.slurm else _node_options()
    if ignores_job_signals():
        # submitit requeues the job at a later signal than SIGTERM, which the ranks ignore, too.
        options["signals_to_handle"] = "SIGINT"
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")
    launch = elastic_launch(
        LaunchConfig(
            min_nodes=config.hardware.nodes,
            max_nodes=config.hardware.nodes,
            nproc_per_node=config.hardware.ranks_per_node,
            max_restarts=0,
            start_method="spawn",
            **options,
        ),
        sys.executable,
    )
    with TemporaryDirectory(prefix="rlhf-") as folder:
        failure_file = Path(folder) / "failure.json"
        told = [str(failure_file), *([] if run_dir is None else [str(run_dir)])]
        try:
            launch("-u", "-m", "rlhf.runtime.rank", *told)
        except SignalException as error:
            raise KeyboardInterrupt from error
        except ChildFailedError as error:
            _explain(read_failure(failure_file), error.failures, run_dir)
        except DistError as error:
            address, port = meeting_point(config, os.environ)
            raise RlhfError(
                f"hardware.nodes={config.hardware.nodes}: the job's tasks did not meet at "
                f"{address}:{port} in {JOIN_MINUTES} minutes; srun must start one on each node, "
                "and launcher.master_port must be free"
            ) from error


def _node_options() -> dict[str, Any]:
    """Where the ranks of a single node meet: on any free port."""
    return {"run_id": uuid.uuid4().hex, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}


def _slurm_options(config: RunConfig) -> dict[str, Any]:
    """Where the tasks of a SLURM job meet: on its first node."""
    task = slurm_task(os.environ)
    assert task is not None
    address, port = meeting_point(config, os.environ)
    return {
        "run_id": f"slurm-{os.environ.get('SLURM_JOB_ID')}",
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{address}:{port}",
        "rdzv_configs": {"rank": task.number, "timeout": JOIN_MINUTES * 60},
    }


def _explain(failure: Failure | None, ends: Mapping[int, Any], run_dir: Path | None) -> None:
    """Raise why the ranks of this node ended: what the first of them said, or how they died.

    Raises:
        RlhfError: it can be said in a line.
        RuntimeError: the rank has printed a traceback.
    """
    if failure is not None and failure.kind is Kind.refused:
        raise RlhfError(failure.message)
    signals = {rank: end.signal_name() for rank, end in ends.items() if end.exitcode < 0}
    # The agent ends the others with SIGTERM.
    killed = {rank: name for rank, name in signals.items() if name != "SIGTERM"} or signals
    if killed and (failure is None or failure.kind is Kind.lost):
        way_out = f"; python launch.py resume={run_dir} goes on with the run" if run_dir else ""
        raise RlhfError(
            f"rank {_listed(killed)} on {socket.gethostname()} was ended by "
            f"{_listed(set(killed.values()))}{way_out}"
        )
    if failure is not None and failure.kind is Kind.lost:
        raise RlhfError(failure.message)
    raise RuntimeError(f"rank {_listed(ends)} failed; its error stands above")


def _listed(items: Iterable[int | str]) -> str:
    return ", ".join(map(str, sorted(items)))
