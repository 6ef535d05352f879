"""Limits of control groups, in trees as containers, SLURM and systemd make them."""

import os
from pathlib import Path

import pytest

from rlhf.base import cpu
from rlhf.base.cpu import HostLimits, available_memory_bytes, num_usable_cores, read_cgroup_limits

ONE_GIB = 1 << 30
NO_LIMIT = {"memory.max": "max", "cpu.max": "max 100000"}
V1 = "5:memory:/slurm/job_7\n4:cpu,cpuacct:/slurm/job_7\n1:name=systemd:/user.slice\n"


@pytest.mark.parametrize(
    ("of_process", "files", "limits"),
    [
        ("0::/\n", {"memory.max": "1073741824\n", "cpu.max": "200000 100000"}, (ONE_GIB, 2.0)),
        ("0::/\n", NO_LIMIT, (None, None)),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "5", "a/cpu.max": "1 2"}, (5, 0.5)),
        ("0::/a/b\n", {"a/b/memory.max": "7", "a/memory.max": "5", "memory.max": "9"}, (5, None)),
        ("0::/../../docker\n", {"memory.max": "6"}, (6, None)),
        (
            V1,
            {
                "memory/slurm/job_7/memory.limit_in_bytes": "9223372036854771712",
                "memory/slurm/memory.limit_in_bytes": "4096",
                "cpu,cpuacct/slurm/job_7/cpu.cfs_quota_us": "150000",
                "cpu,cpuacct/slurm/job_7/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            (4096, 1.5),
        ),
        ("3:memory:/docker/1f2\n", {"memory/memory.limit_in_bytes": "8"}, (8, None)),  # a container
        (None, {}, (None, None)),
    ],
)
def test_the_lowest_limit_of_all_groups_holds(
    of_process: str | None,
    files: dict[str, str],
    limits: tuple[int | None, float | None],
    tmp_path: Path,
) -> None:
    if of_process is not None:
        (tmp_path / "cgroup").write_text(of_process)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert read_cgroup_limits(tmp_path / "cgroup", tmp_path / "groups") == limits


@pytest.mark.parametrize(("quota", "cores"), [(None, 64), (2.0, 2), (1.5, 1), (0.2, 1), (99, 64)])
def test_a_quota_limits_the_cores(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(cpu, "read_cgroup_limits", lambda: HostLimits(None, quota))
    assert num_usable_cores() == cores


def test_memory_of_caches_is_available(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemAvailable:   30 kB\nCached: 9 kB\n")
    assert available_memory_bytes(tmp_path / "meminfo") == 30 * 1024
