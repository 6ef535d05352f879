"""Decide how, and by which command, ranks start; read only the hostfile and .deepspeed_env."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from rlhf.base.errors import ConfigError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.user_paths import expand_user_path, read_user_text
from rlhf.config.batches import num_ranks
from rlhf.config.schema.run import LauncherConfig, RunConfig

DEFAULT_PORT = 29500
# Variables of this node that ranks on other nodes would miss: settings, and secrets, each with the
# command that stores it in the home folder instead.
SETTINGS = "RLHF_CACHE HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_ENDPOINT HF_HUB_OFFLINE".split()
SECRETS = {"HF_TOKEN": "hf auth login", "WANDB_API_KEY": "wandb login"}
JOB_PORTS = range(20_000, 29_000)  # below the ports that Linux gives to clients, from 32768


class LaunchMode(StrEnum):
    """The ways to start the ranks: by which program, or by the user."""

    process = "process"  # no program: one rank runs in this process
    node = "node"  # torchrun's agent, on this node
    slurm = "slurm"  # torchrun's agent in every task of a SLURM job, on the task's node
    hostfile = "hostfile"  # the DeepSpeed launcher, on the nodes of a hostfile
    by_hand = "by_hand"  # the user, with torchrun on every node


class SlurmTask(NamedTuple):
    """One task of a SLURM job, which is one node of the run."""

    number: int  # from 0
    num_tasks: int
    first_host: str


class Program(NamedTuple):
    """The program that a command runs: an interpreter, launch.py and its arguments."""

    python: str
    script: str
    arguments: Sequence[str]


def launch_mode(config: RunConfig, environment: Mapping[str, str]) -> LaunchMode:
    """Return how a process with this ``environment`` starts the ranks of ``config``.

    Raises:
        ConfigError: if hostfile or SLURM job do not fit ``config``, or no option names the nodes.
    """
    nodes = config.hardware.nodes
    if config.launcher.hostfile is not None:
        check_hostfile(config)
        return LaunchMode.hostfile
    task = find_slurm_task(environment)
    if task is not None and (nodes > 1 or task.number > 0):
        _check_slurm_task(task, nodes, environment)
        return LaunchMode.slurm
    if nodes == 1:
        return LaunchMode.process if num_ranks(config) == 1 else LaunchMode.node
    if config.launcher.master_addr is not None:
        return LaunchMode.by_hand
    raise ConfigError(
        f"hardware.nodes={nodes}: no option names the nodes; use launcher.hostfile=FILE with one "
        "`name slots=N` per line, or -m hydra/launcher=submitit_slurm (or srun inside a SLURM "
        "job), or launcher.master_addr=ADDRESS with torchrun on every node; see docs/operations.md"
    )


def launch_commands(
    config: RunConfig, program: Program, environment: Mapping[str, str]
) -> list[list[str]]:
    """Return commands that start the ranks: one, or one per node for a user who starts them."""
    python, script, arguments = program
    hardware, launcher = config.hardware, config.launcher
    ranks = f"--nproc-per-node={hardware.ranks_per_node}"
    address, port = rendezvous_address(launcher, environment)
    torchrun = [python, "-m", "torch.distributed.run"]
    match launch_mode(config, environment):
        case LaunchMode.process:
            return [[python, script, *arguments]]
        case LaunchMode.node:
            return [[*torchrun, "--standalone", ranks, script, *arguments]]
        case LaunchMode.hostfile:
            refuse_variables_of_one_node(environment)
            deepspeed = [python, "-m", "deepspeed.launcher.runner"]
            master = launcher.master_addr  # if null, DeepSpeed asks the master node for its address
            options = [
                f"--hostfile={expand_user_path(launcher.hostfile or '', key='launcher.hostfile')}",
                *([] if master is None else [f"--master_addr={master}"]),
                f"--master_port={port}",
                "--no_local_rank",
            ]
            return [[*deepspeed, *options, script, *arguments]]
        case LaunchMode.slurm:
            task = find_slurm_task(environment)
            assert task is not None
            numbers: Sequence[int] = [task.number]
        case LaunchMode.by_hand:
            numbers = range(hardware.nodes)
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


def rendezvous_address(launcher: LauncherConfig, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and port of the first node, to which all nodes connect.

    A port that is not set follows from a SLURM job's number: jobs on a node rarely share a port.
    """
    task, port = find_slurm_task(environment), launcher.master_port or DEFAULT_PORT
    address = launcher.master_addr or (task.first_host if task is not None else "localhost")
    if launcher.master_port is None and "SLURM_JOB_ID" in environment:
        port = JOB_PORTS[read_whole_number(environment, "SLURM_JOB_ID") % len(JOB_PORTS)]
    return address, port


def find_slurm_task(environment: Mapping[str, str]) -> SlurmTask | None:
    """Return the SLURM task that this process runs; None if SLURM set no variables of a task."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes or "SLURM_PROCID" not in environment or "SLURM_NTASKS" not in environment:
        return None
    number = read_whole_number(environment, "SLURM_PROCID")
    return SlurmTask(number, read_whole_number(environment, "SLURM_NTASKS"), first_host(nodes))


def read_whole_number(environment: Mapping[str, str], name: str, least: int = 0) -> int:
    """Return the value, ``least`` or more, of an environment variable that a launcher sets."""
    value = environment[name]
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(
            f"the environment variable {name}={value}: must be a whole number of {least} or more; "
            "unset it, or start the ranks with torchrun, deepspeed or srun, which set it"
        )
    return int(value)


def first_host(nodes: str) -> str:
    """Return the first name in a SLURM node list: ``a[01-02,7],b`` begins with a01."""
    if not re.fullmatch(r"([^,\[\]]|\[\d+(-\d+)?(,\d+(-\d+)?)*\]|,(?!,))+", nodes):
        raise ConfigError(f"SLURM's list of nodes {nodes}: must be like a[01-02,7],b")
    name = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name)


def _check_slurm_task(task: SlurmTask, nodes: int, environment: Mapping[str, str]) -> None:
    """Check that the SLURM job has exactly one task for each node of the run."""
    has_node_count = "SLURM_NNODES" in environment
    on_nodes = read_whole_number(environment, "SLURM_NNODES") if has_node_count else task.num_tasks
    if not task.num_tasks == on_nodes == nodes:
        raise ConfigError(
            f"SLURM_NTASKS={task.num_tasks} on SLURM_NNODES={on_nodes} with hardware.nodes="
            f"{nodes}: a run has one task on each node, which starts the node's ranks; "
            f"use srun --nodes={nodes} --ntasks-per-node=1, or hardware.nodes={on_nodes}"
        )


def refuse_variables_of_one_node(environment: Mapping[str, str]) -> None:
    """Raise a ConfigError if ranks of other nodes would miss a variable that is set here.

    The DeepSpeed launcher passes on what the file .deepspeed_env lists, and prints it.
    """
    file_name = environment.get("DS_ENV_FILE", ".deepspeed_env")
    files = (folder / file_name for folder in (Path.home(), Path()))
    texts = [read_user_text(file) for file in files if file.is_file()]
    passed = {line.partition("=")[0].strip() for text in texts for line in text.splitlines()}
    missing = [name for name in SETTINGS if name in environment and name not in passed]
    if missing:
        lines = " and ".join(f"{name}={environment[name]}" for name in missing)
        raise ConfigError(
            f"{missing[0]} is set here, and the DeepSpeed launcher does not pass it to the nodes "
            f"of launcher.hostfile: write {lines} to {file_name} in this folder, one per line"
        )
    for name in (each for each in SECRETS if each in environment and each not in passed):
        raise ConfigError(
            f"{name} is set here, and the DeepSpeed launcher does not pass it to the nodes of "
            f"launcher.hostfile, or would print it: type `{SECRETS[name]}` on each node (only "
            f"once if they share the home folder), and start with `env -u {name} python ...`"
        )


def check_hostfile(config: RunConfig) -> None:
    """Check that the hostfile names hardware.nodes nodes, each with ranks_per_node slots."""
    name, hardware = config.launcher.hostfile, config.hardware
    assert name is not None

    def build_read_error(reason: str) -> ConfigError:
        return ConfigError(
            f"launcher.hostfile={name} cannot be read ({reason.removesuffix(f': {name}')}): "
            "give a file with one `name slots=N` per line"
        )

    with translate_errors(build_read_error):
        lines = read_user_text(expand_user_path(name, key="launcher.hostfile")).splitlines()
    hosts: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if (match := re.fullmatch(r"\s*(\S+)\s+slots=(\d+)\s*(?:#.*)?", line)) is None:
            raise ConfigError(
                f"{name}:{number}: {line.strip()}: must be `name slots=N`, with N ranks on the node"
            )
        host, slots = match[1], int(match[2])
        if host in hosts:
            raise ConfigError(f"{name}:{number}: {host} is listed twice; keep one line per host")
        if slots != hardware.ranks_per_node:
            raise ConfigError(
                f"{name}:{number}: {host} has slots={slots}, and "
                f"hardware.ranks_per_node={hardware.ranks_per_node}; make them equal"
            )
        hosts.add(host)
    if len(hosts) != hardware.nodes:
        raise ConfigError(
            f"launcher.hostfile={name} names {len(hosts)} nodes, and hardware.nodes="
            f"{hardware.nodes}; make them equal"
        )
