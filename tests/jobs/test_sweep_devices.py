"""The GPUs that nvidia-smi names for the jobs of a sweep."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rlhf.base.cpu import JOBS_ENV, num_jobs_on_machine
from rlhf.base.errors import CapabilityError
from rlhf.config.choices import Device
from rlhf.config.schema.hardware import HardwareConfig
from rlhf.jobs.sweep_jobs import _visible_devices, resources_of_share, restrict_plans_to_share

TWO = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
"""
MIG = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)
  MIG 3g.20gb     Device  0: (UUID: MIG-a)
  MIG 3g.20gb     Device  1: (UUID: MIG-b)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)
"""
DOWN = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


@pytest.fixture(autouse=True)
def _nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def install(folder: Path, text: str, *, code: int = 0) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "{text.strip()}"\nexit {code}\n')
    program.chmod(0o755)


@pytest.mark.parametrize(("text", "names"), [(TWO, ["0", "1"]), (MIG, ["MIG-a", "MIG-b", "1"])])
def test_gpus_and_the_parts_of_a_divided_one_are_named(
    text: str, names: list[str], tmp_path: Path
) -> None:
    install(tmp_path, text)
    assert _visible_devices() == names


def test_a_driver_that_is_down_has_no_gpus(tmp_path: Path) -> None:
    install(tmp_path, DOWN, code=9)
    with pytest.raises(CapabilityError, match=r"couldn't communicate.*CUDA_VISIBLE_DEVICES=0,1"):
        _visible_devices()


def test_without_nvidia_smi_the_user_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapabilityError, match=r"No such file.*CUDA_VISIBLE_DEVICES=0,1"):
        _visible_devices()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    assert _visible_devices() == ["3", "GPU-5"]


def test_jobs_side_by_side_are_planned_with_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [set(range(8))]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: given[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: given.append(set(cores)))
    hardware = cast("HardwareConfig", SimpleNamespace(device=Device.cpu, ranks_per_node=1))
    with restrict_plans_to_share(hardware, 4):
        assert (num_jobs_on_machine(), len(given[-1])) == (4, 2)
    assert (num_jobs_on_machine(), len(given[-1])) == (1, 8)
    assert resources_of_share(hardware, 0, 2)[0][JOBS_ENV] == "2", "trials of a search plan so too"
