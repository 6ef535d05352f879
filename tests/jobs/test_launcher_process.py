"""Idle threads spin only where cores are not shared; the user's allocator stays as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf.base.command import set_cuda_allocator
from rlhf.jobs import launch_command
from rlhf.jobs.launch_command import SPIN_COUNT, set_spin_count

QUIET = "some avg10=3.10 avg60=2.00 avg300=0.70 total=17\nfull avg10=0.00 avg60=0.00\n"
SHARED = QUIET.replace("3.10", "98.85")


@pytest.mark.parametrize(
    ("text", "given", "expected", "line"),
    [
        (QUIET, None, "10000", ""),
        (SHARED, None, "100", "other programs share the cores"),
        (SHARED, "7", "7", ""),
        (None, None, "10000", ""),
        ("", None, "10000", ""),
    ],
)
def test_spin_count_follows_the_time_that_programs_wait(
    text: str | None,
    given: str | None,
    expected: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {SPIN_COUNT: given})
    pressure = tmp_path / "cpu"
    if text is not None:
        pressure.write_text(text)
    monkeypatch.setattr(launch_command, "notices", noted := [])
    set_spin_count(pressure)
    assert os.environ[SPIN_COUNT] == expected
    assert len(noted) == bool(line)
    assert all(each.startswith(line) for each in noted)


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {}),
    ],
)
def test_the_users_allocator_stays(
    given: dict[str, str], added: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    set_cuda_allocator()
    assert os.environ == given | added
