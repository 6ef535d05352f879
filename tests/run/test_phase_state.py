"""Checkpoints inside a phase: whole or not used, and never a reason to lose an earlier one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from rlhf.base import atomic
from rlhf.base.errors import CheckpointError
from rlhf.run import phase_state
from rlhf.run.phase_state import (
    SkippedError,
    checkpoint_folder,
    checkpoint_folders,
    find_latest_intact_checkpoint,
    load_checkpoint,
    write_checkpoint,
)

TENSORS = {"weights/a": torch.arange(6.0), "first/a": torch.ones(6), "weights/b": torch.zeros(3)}


def write(phase_dir: Path, step: int, *, wanted_bytes: int = 1) -> Path:
    streams = {"model": TENSORS.items()}
    state = {"results": {"before": 0.5}}
    write_checkpoint(phase_dir, step, streams, state, wanted_bytes=wanted_bytes)
    return checkpoint_folder(phase_dir, step)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    found = load_checkpoint(write(tmp_path, 7))
    assert (found.step, found.state["results"]) == (7, {"before": 0.5})
    read = found.build_tensor_reader("model")
    assert read("weights/a", slice(2, 4)).tolist() == [2.0, 3.0]
    assert len(read("weights/b", slice(3, 3))) == 0
    with pytest.raises(CheckpointError, match="model has no weights/c: it is the checkpoint of an"):
        read("weights/c", slice(0, 1))


def test_latest_comes_first(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        write(tmp_path, step)
    assert [path.name for path in checkpoint_folders(tmp_path)] == [
        "step-00000100",
        "step-00000010",
        "step-00000009",
    ]


FILES = ("model/model.safetensors", "state.json", "manifest.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_a_flipped_bit_is_found_and_the_earlier_checkpoint_used(
    name: str, share: float, tmp_path: Path
) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2) / name
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)
    said: list[str] = []
    found = find_latest_intact_checkpoint(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    (line,) = said
    assert line.startswith("warning: ")
    assert str(path.parent if name == "manifest.json" else path) in line
    assert line.endswith("It is not used")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_torn_file_is_found(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, 2) / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert find_latest_intact_checkpoint(tmp_path, lambda _: None) is None
    path.unlink()
    assert find_latest_intact_checkpoint(tmp_path, lambda _: None) is None


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path: Path) -> None:
    write(tmp_path, 2).rename(checkpoint_folder(tmp_path, 3))
    with pytest.raises(CheckpointError, match="is of step 2: it was renamed"):
        load_checkpoint(checkpoint_folder(tmp_path, 3))


def test_an_unfinished_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield from TENSORS.items()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, 4, {"model": torn()}, {}, wanted_bytes=1)
    assert checkpoint_folders(tmp_path) == []


def test_no_room_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = write(tmp_path, 1)
    free = shutil.disk_usage(tmp_path)._replace(free=1 << 29)
    monkeypatch.setattr(phase_state.shutil, "disk_usage", lambda _: free)
    with pytest.raises(CheckpointError, match=r"needs 2 GiB, and 0\.5 GiB are free"):
        write(tmp_path, 2, wanted_bytes=2 << 30)
    assert checkpoint_folders(tmp_path) == [earlier]


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "drive"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_drive_leaves_the_earlier_checkpoint(small_drive: Path) -> None:
    earlier = write(small_drive, 1)
    streams = {"model": {"weights/a": torch.zeros(1 << 15)}.items()}
    with pytest.raises(CheckpointError, match="Earlier checkpoints are intact"):
        write_checkpoint(small_drive, 2, streams, {}, wanted_bytes=1)
    assert checkpoint_folders(small_drive) == [earlier]
    assert load_checkpoint(earlier).step == 1
    assert [path.name for path in earlier.parent.iterdir()] == [earlier.name], "nothing is left"


def test_a_read_only_folder_is_named(small_drive: Path) -> None:
    earlier = write(small_drive, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_drive)], check=True)
    with pytest.raises(CheckpointError, match=r"cannot be written \(Read-only file system\)"):
        write(small_drive, 2)
    assert load_checkpoint(earlier).step == 1


def flaky(monkeypatch: pytest.MonkeyPatch, errors: list[str]) -> list[float]:
    """Let safetensors fail with each of ``errors``; return the seconds that are waited."""
    save_file, waits = safetensors.torch.save_file, list[float]()

    def save(*arguments: Any, **options: Any) -> None:
        if errors:
            raise SafetensorError(f"Error while serializing: I/O error: {errors.pop()}")
        save_file(*arguments, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", save)
    monkeypatch.setattr(atomic.time, "sleep", waits.append)
    return waits


def test_a_hiccup_of_the_drive_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = flaky(monkeypatch, ["Stale file handle (os error 116)"] * 3)
    assert load_checkpoint(write(tmp_path, 1)).step == 1
    assert waits == [0.5, 2.0, 8.0]


def test_a_long_hiccup_skips_the_checkpoint_and_a_full_drive_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = write(tmp_path, 1)
    flaky(monkeypatch, ["Input/output error (os error 5)"] * 4)
    with pytest.raises(
        SkippedError, match=r"step-00000002: the checkpoint is skipped, .*Input/output"
    ):
        write(tmp_path, 2)
    assert list(earlier.parent.iterdir()) == [earlier]
    waits = flaky(monkeypatch, ["No space left on device (os error 28)"])
    with pytest.raises(CheckpointError, match="cannot be written") as ended:
        write(tmp_path, 3)
    assert (type(ended.value), waits) == (CheckpointError, [])
