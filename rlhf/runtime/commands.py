"""Which way the ranks of a run are started, and by which command; pure but for the hostfile."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from rlhf.config.checks import num_ranks
from rlhf.config.launch_checks import check_hostfile
from rlhf.config.schema import RunConfig
from rlhf.errors import ConfigError


class Way(StrEnum):
    """Who starts the ranks."""

    process = "process"
    """Nobody: one rank, in this process."""
    node = "node"
    """torchrun's agent, those of this node."""
    slurm = "slurm"
    """torchrun's agent of every task of a SLURM job, those of its node."""
    hostfile = "hostfile"
    """The DeepSpeed launcher, on the nodes of a hostfile."""
    by_hand = "by_hand"
    """The user, with torchrun on every node."""


class Task(NamedTuple):
    """One task of a SLURM job, which is one node of the run."""

    number: int
    size: int
    hosts: list[str]


class Program(NamedTuple):
    """What a command runs: an interpreter, launch.py and its arguments."""

    python: str
    script: str
    arguments: Sequence[str]


def launch_way(config: RunConfig, environment: Mapping[str, str]) -> Way:
    """How the ranks of ``config`` are started in a process with this environment.

    Raises:
        ConfigError: the hostfile or the SLURM job has other nodes, or nothing names the nodes.
    """
    nodes = config.hardware.nodes
    if config.launcher.hostfile is not None:
        check_hostfile(config)
        return Way.hostfile
    task = slurm_task(environment)
    if task is not None and (nodes > 1 or task.number > 0):
        _check_task(task, config, environment)
        return Way.slurm
    if nodes == 1:
        return Way.process if num_ranks(config) == 1 else Way.node
    if config.launcher.master_addr is not None:
        return Way.by_hand
    raise ConfigError(
        f"hardware.nodes={nodes}: nothing says which nodes; use launcher.hostfile=FILE with one "
        "`name slots=N` a line, or -m hydra/launcher=submitit_slurm (or srun inside a SLURM job), "
        "or launcher.master_addr=ADDRESS with torchrun on every node; see docs/launching.md"
    )


def launch_commands(
    config: RunConfig, program: Program, environment: Mapping[str, str]
) -> list[list[str]]:
    """The command that starts the ranks, as words; by hand one for each node, in their order."""
    python, script, arguments = program
    hardware, launcher = config.hardware, config.launcher
    ranks = f"--nproc-per-node={hardware.ranks_per_node}"
    torchrun = [python, "-m", "torch.distributed.run"]
    match launch_way(config, environment):
        case Way.process:
            return [[python, script, *arguments]]
        case Way.node:
            return [[*torchrun, "--standalone", ranks, script, *arguments]]
        case Way.hostfile:
            deepspeed = [python, "-m", "deepspeed.launcher.runner"]
            first = launcher.master_addr  # where it is null the launcher asks the first node
            options = [
                f"--hostfile={Path(launcher.hostfile or '').expanduser()}",
                *([] if first is None else [f"--master_addr={first}"]),
                f"--master_port={launcher.master_port}",
                "--no_local_rank",
            ]
            return [[*deepspeed, *options, script, *arguments]]
        case Way.slurm:
            task = slurm_task(environment)
            assert task is not None
            numbers: Sequence[int] = [task.number]
        case Way.by_hand:
            numbers = range(hardware.nodes)
    address, port = meeting_point(config, environment)
    return [
        [
            *torchrun,
            f"--nnodes={hardware.nodes}",
            f"--node-rank={number}",
            ranks,
            f"--master-addr={address}",
            f"--master-port={port}",
            script,
            *arguments,
        ]
        for number in numbers
    ]


def in_shell(command: Sequence[str]) -> str:
    """The line to type for a command."""
    return shlex.join(command)


def meeting_point(config: RunConfig, environment: Mapping[str, str]) -> tuple[str, int]:
    """Address and port on the first node where the nodes meet."""
    task, launcher = slurm_task(environment), config.launcher
    address = launcher.master_addr or (task.hosts[0] if task is not None else "localhost")
    return address, launcher.master_port


def slurm_task(environment: Mapping[str, str]) -> Task | None:
    """The task of a SLURM job that this process is; None outside of one."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes or "SLURM_PROCID" not in environment or "SLURM_NTASKS" not in environment:
        return None
    return Task(int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"]), hosts_of(nodes))


def hosts_of(nodes: str) -> list[str]:
    """The names in a node list of SLURM: ``a[01-02,7],b`` is a01, a02, a7 and b."""
    names = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    return [host for name in names for host in _expanded(name)]


def _expanded(name: str) -> list[str]:
    """The names that one name with brackets stands for."""
    parts = re.split(r"\[([^\]]*)\]", name)  # text and ranges, in turn
    choices = [_range(part) if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(each) for each in itertools.product(*choices)]


def _range(text: str) -> list[str]:
    """The numbers of ``01-03,7``, as wide as they are written."""
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return numbers


def _check_task(task: Task, config: RunConfig, environment: Mapping[str, str]) -> None:
    """The job has one task for each node of the run."""
    nodes = config.hardware.nodes
    on_nodes = int(environment.get("SLURM_NNODES", task.size))
    if not task.size == on_nodes == nodes:
        raise ConfigError(
            f"SLURM_NTASKS={task.size} on SLURM_NNODES={on_nodes} with hardware.nodes={nodes}: "
            "a run has one task on each node, which starts the node's ranks; "
            f"use srun --nodes={nodes} --ntasks-per-node=1, or hardware.nodes={on_nodes}"
        )


def script_name(path: Path) -> str:
    """``path`` as it is typed: from the current folder where it lies in it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
