"""Connect ranks that torchrun or deepspeed started, as their environment variables describe.

Nothing here imports torch before a rank really starts, so that --help stays fast.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from rlhf.base.cpu import num_usable_cores
from rlhf.base.errors import ConfigError, RlhfError
from rlhf.config.batches import num_ranks
from rlhf.config.choices import Device
from rlhf.config.machine_rates import resolve_cpu_dtype
from rlhf.config.schema.hardware import HardwareConfig
from rlhf.config.schema.run import RunConfig
from rlhf.config.validation import validate
from rlhf.rewards.isolated import check_reward_parts
from rlhf.runtime.launch_mode import LaunchMode, find_slurm_task, launch_mode, read_whole_number
from rlhf.runtime.rank_output import describe_rank
from rlhf.runtime.watchdog import Process

RUN_DIR_KEY = "rlhf/run_dir"
PROCESS_KEY = "rlhf/process"
REFUSAL_KEY = "rlhf/refusal"
WORK_KEY = "rlhf/first_on_node"
POD_VARIABLES = {"RANK", "WORLD_SIZE"}
RANK_VARIABLES = POD_VARIABLES | {"LOCAL_RANK"}  # torchrun and the DeepSpeed launcher set all
# Seconds that rank 0, if it refuses the run, waits until the other ranks have read the reason.
REFUSAL_WAIT_S = 30.0


def rank_from_environment() -> int | None:
    """Return the rank of a process that torchrun or the DeepSpeed launcher started, else None."""
    if not RANK_VARIABLES.issubset(os.environ):
        return None
    rank = read_whole_number(os.environ, "RANK")
    if rank >= read_whole_number(os.environ, "WORLD_SIZE", least=1):
        raise ConfigError(f"RANK={rank}: must be below WORLD_SIZE={os.environ['WORLD_SIZE']}")
    return rank


def unset_pod_variables() -> str | None:
    """Remove RANK and WORLD_SIZE if they number pods instead of ranks; return advice or None.

    Kubeflow's PyTorchJob and Alibaba PAI set both in every pod, without LOCAL_RANK. They are
    removed because libraries would read them too, and LOCAL_RANK is set for DeepSpeed later on.
    """
    if not POD_VARIABLES.issubset(os.environ) or "LOCAL_RANK" in os.environ:
        return None
    rank, world = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    if world == "1":
        return None
    return (
        f"RANK={rank} and WORLD_SIZE={world} without LOCAL_RANK: torchrun did not start this "
        "process, which therefore runs by itself. Start torchrun on every pod with "
        "--nnodes=$WORLD_SIZE --node-rank=$RANK, or unset both variables (docs/operations.md)"
    )


def replace_rank_counts(config: RunConfig) -> RunConfig:
    """Return ``config`` with the numbers of nodes and ranks that were really started.

    Raises:
        ConfigError: if batch sizes do not divide over the ranks, or the ranks cannot be started.
    """
    if rank_from_environment() is None:
        check_ranks_started(config)
        return config
    sizes = [n for n in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE") if os.environ.get(n)]
    world = read_whole_number(os.environ, "WORLD_SIZE", least=1)
    per_node = read_whole_number(os.environ, sizes[0], least=1)
    if world % per_node:
        raise ConfigError(
            f"WORLD_SIZE={world}: must be a multiple of the {per_node} ranks per node"
        )
    hardware = replace(config.hardware, nodes=world // per_node, ranks_per_node=per_node)
    config = replace(config, hardware=hardware)
    validate(config)
    return config


def ignores_job_signals() -> bool:
    """Return True in a SLURM job: its signals reach ranks too, but only tasks handle them."""
    return "SLURM_PROCID" in os.environ


def check_ranks_started(config: RunConfig) -> None:
    """Check that the ranks were started, or that this process can start them."""
    if rank_from_environment() is None and launch_mode(config, os.environ) is LaunchMode.by_hand:
        raise ConfigError(
            f"hardware.nodes={config.hardware.nodes} with launcher.master_addr="
            f"{config.launcher.master_addr}: the ranks must be started with torchrun on every "
            "node; launcher.dry_run=true prints the commands"
        )


def check_ranks_can_start(config: RunConfig) -> None:
    """Check that this machine has its ranks' devices and precision, and can compute the rewards."""
    hardware = config.hardware
    if hardware.device is Device.cpu:
        resolve_cpu_dtype(hardware.dtype)  # without torch
    elif (
        rank_from_environment() is not None
        or launch_mode(config, os.environ) is not LaunchMode.hostfile
    ):
        from rlhf.engine.devices import check_devices as check

        check(hardware)
    if hardware.nodes == 1:  # with several nodes, each rank checks the rewards itself
        check_reward_parts(config)


def is_secondary_node() -> bool:
    """Return True if this process starts ranks of a run that another node plans and freezes."""
    task = find_slurm_task(os.environ)
    return rank_from_environment() is None and task is not None and task.number > 0


class Rendezvous:
    """The connection between started ranks, made before any of them has a device.

    An RlhfError is raised if other ranks do not connect. ``on_loss`` is called from a separate
    thread if another rank ends early.
    """

    def __init__(self, on_loss: Callable[[str], None]) -> None:
        from torch.distributed import DistError
        from torch.distributed.rendezvous import rendezvous

        self._on_loss = on_loss
        self.others: dict[int, Process] = {}  # the processes of the other ranks
        try:
            self._store, self.rank, self._size = next(rendezvous("env://"))
        except DistError as error:
            raise RlhfError(f"the ranks did not meet at {_store_address()}: {error}") from error

    def agree_on_run_dir(self, run_dir: Path | None) -> Path:
        """Return the run directory, which rank 0 publishes, and start to monitor other ranks.

        Raises:
            RlhfError: if rank 0 refused the run, or ended before the run began.
        """
        from torch.distributed import DistError

        from rlhf.runtime.peer_monitor import PeerMonitor

        if self.rank == 0:
            assert run_dir is not None
            self._store.set(RUN_DIR_KEY, str(run_dir.resolve()))
        try:
            published = self._store.get(RUN_DIR_KEY).decode()
            if not published:
                refusal = self._store.get(REFUSAL_KEY).decode()
                self._let_others_hear()
                raise RlhfError(f"rank 0 refused the run: {refusal}")
            master = (os.environ["MASTER_ADDR"], read_whole_number(os.environ, "MASTER_PORT"))
            self._monitor = PeerMonitor(
                self._store,
                self.rank,
                name=describe_rank(self.rank, Path(published)),
                master=master,
                on_loss=self._on_loss,
                is_one_machine=os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"],
            )
        except (DistError, OSError) as error:
            raise RlhfError(
                f"rank 0 ended before the run began; see the error on {_store_address()}"
            ) from error
        return Path(published)

    def publish_refusal(self, reason: str) -> None:
        """As rank 0, publish the reason why there is no run, instead of a run directory."""
        self._store.set(REFUSAL_KEY, reason)
        self._store.set(RUN_DIR_KEY, "")
        self._let_others_hear()

    def _let_others_hear(self) -> None:
        """Count this rank among those that have heard a refusal; as rank 0, wait for the others.

        The store can end with the process of rank 0.
        """
        deadline = time.monotonic() + (REFUSAL_WAIT_S if self.rank == 0 else 0)
        heard = self._store.add(f"{REFUSAL_KEY}/heard", 1)
        while heard < self._size and time.monotonic() < deadline:
            time.sleep(0.1)
            heard = self._store.add(f"{REFUSAL_KEY}/heard", 0)

    def run_first_on_each_node(self, work: Callable[[], None], config: RunConfig) -> bool:
        """Call ``work`` on the first rank of each node; return True on these ranks.

        All ranks wait for it, and need no process group.

        Raises:
            RlhfError: on all ranks, if ``work`` raised one on any node.
        """
        is_first, reason = read_whole_number(os.environ, "LOCAL_RANK") == 0, ""
        try:
            if is_first:
                work()
        except RlhfError as error:
            reason = str(error)
        keys = [f"{WORK_KEY}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self.rank], reason)
        self._store.wait(keys, timedelta(minutes=config.launcher.timeout_minutes))
        for raised in filter(None, self._store.multi_get(keys)):
            self._monitor.announce_success()  # each rank ends with this error, and is not lost
            self._let_others_hear()
            raise RlhfError(raised.decode())
        return is_first

    def start_process_group(self, config: RunConfig) -> None:
        """Start the process group of all ranks, and exchange their process ids."""
        from rlhf.engine.devices import select_device, start_process_group

        if self._size != num_ranks(config):
            raise ConfigError(
                f"WORLD_SIZE={self._size}: must match hardware.nodes="
                f"{config.hardware.nodes} x hardware.ranks_per_node="
                f"{config.hardware.ranks_per_node}; start exactly that many ranks"
            )
        select_device(config.hardware.device)
        start_process_group(
            config.hardware.device,
            store=self._store,
            rank=self.rank,
            world_size=self._size,
            timeout=timedelta(minutes=config.launcher.timeout_minutes),
        )
        this_process = Process(socket.gethostname(), os.getpid())
        self._store.set(f"{PROCESS_KEY}/{self.rank}", json.dumps(this_process))
        self.others = {
            rank: Process(*json.loads(self._store.get(f"{PROCESS_KEY}/{rank}")))
            for rank in range(self._size)
            if rank != self.rank
        }

    def announce_failure(self, reason: str) -> None:
        """Send the other ranks the reason for which this rank ends."""
        self._monitor.announce_failure(reason)

    def announce_success(self) -> None:
        """Notify the other ranks that this rank has finished, and leave the process group."""
        import torch

        self._monitor.announce_success()
        torch.distributed.destroy_process_group()


def _store_address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def num_cores_per_rank(hardware: HardwareConfig) -> int:
    """Return the number of CPU cores that one rank computes on."""
    return hardware.cores_per_rank or max(1, num_usable_cores() // hardware.ranks_per_node)
