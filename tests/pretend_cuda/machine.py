"""Machines with GPUs that do not exist: their cards, how many of them, and the driver."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.pretend_cuda.environment import Set
from tests.pretend_cuda.gpu import GIB, Card, Gpu, load

DRIVER = Path("/proc/driver/nvidia/version")
NAME = "PRETEND_MACHINE"  # environment variable: the machine of a process that another starts
VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Release Build"


@dataclass(frozen=True)
class Machine:
    """What torch and the driver say of a machine's GPUs."""

    card: Card = field(default_factory=Card)
    devices: int = 1
    driver: str | None = "580.95.05"  # None: no driver is loaded


V100 = Card("Tesla V100-SXM2-32GB", int(31.73 * GIB), (7, 0))
PART = Card("NVIDIA A100-SXM4-40GB MIG 3g.20gb", int(19.62 * GIB))
UNKNOWN_CARD = Card("NVIDIA RTX PRO 6000 Blackwell", int(94.97 * GIB), (12, 0))
MACHINES = {
    "a100": Machine(),
    "2xa100": Machine(devices=2),
    "3xa100": Machine(devices=3),
    "8xa100": Machine(devices=8),
    "none": Machine(devices=0, driver=None),
    "hidden": Machine(devices=0),  # as with CUDA_VISIBLE_DEVICES=
    "mig": Machine(PART),
    "old_driver": Machine(devices=0, driver="535.104.05"),  # torch finds no GPU then
    "unknown": Machine(UNKNOWN_CARD),
    "v100": Machine(V100),
}


def pretend(machine: Machine | None = None) -> Gpu:
    """Give this process a machine's GPUs until it ends; torch must not be imported before."""
    machine = machine or Machine()
    gpu = Gpu(load(), machine.card, devices=machine.devices)
    from tests.pretend_cuda.torch_cuda import replace

    gpu.start()
    replace(gpu, setattr)
    replace_driver(machine.driver, setattr)
    return gpu


def replace_driver(version: str | None, set_: Set) -> None:
    """Let programs find this version of the driver, or none."""
    exists, read_text = Path.exists, Path.read_text

    def read(path: Path, *args: Any, **how: Any) -> str:
        if path != DRIVER or version is None:
            return read_text(path, *args, **how)
        return VERSION.format(version)

    set_(Path, "exists", lambda p, **how: version is not None if p == DRIVER else exists(p, **how))
    set_(Path, "read_text", read)
