"""Checkpoints inside a phase: whole or not used, and never a reason to lose an earlier one."""

import errno
import json
import math
import os
import pickle
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from rlhf.base import atomic
from rlhf.base import ranks as ranks_module
from rlhf.base.errors import CapabilityError, CheckpointError
from rlhf.base.ranks import Ranks
from rlhf.base.types import TensorSlice
from rlhf.run import phase_state
from rlhf.run.phase_state import (
    SkippedError,
    checkpoint_folder,
    checkpoint_folders,
    find_latest_intact_checkpoint,
    load_checkpoint,
    write_checkpoint,
)
from tests.runs import flip

TENSORS = {"weights/a": torch.arange(6.0), "first/a": torch.ones(6), "weights/b": torch.zeros(3)}


def write(phase_dir: Path, step: int, *, wanted_bytes: int = 1) -> Path:
    streams = {"model": [(name, 0, tensor) for name, tensor in TENSORS.items()]}
    state = {"results": {"before": 0.5, "spread": math.inf}, "logs": {}}
    write_checkpoint(phase_dir, step, streams, state, wanted_bytes=wanted_bytes)
    return checkpoint_folder(phase_dir, step)


def test_a_checkpoint_without_the_sizes_of_the_logs_is_refused(tmp_path: Path) -> None:
    """Not taken as zeros, to which a resumed run would cut its metrics."""
    streams = {"model": [("weights/a", 0, torch.ones(1))]}
    write_checkpoint(tmp_path, 1, streams, {}, wanted_bytes=0)
    with pytest.raises(CheckpointError, match=r"state\.json is damaged.*logs is missing"):
        load_checkpoint(checkpoint_folder(tmp_path, 1))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    found = load_checkpoint(write(tmp_path, 7))
    assert (found.step, found.state["results"]) == (7, {"before": 0.5, "spread": math.inf})
    read = found.build_tensor_reader("model")
    assert read("weights/a", slice(2, 4)).tolist() == [2.0, 3.0]
    assert len(read("weights/b", slice(3, 3))) == 0
    with pytest.raises(CheckpointError, match="model has no weights/c: it is the checkpoint of an"):
        read("weights/c", slice(0, 1))


def test_a_state_of_another_format_is_refused_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not skipped like a damaged one: the phase would begin again from an earlier checkpoint."""
    write(tmp_path, 1)
    monkeypatch.setattr(phase_state, "STATE_FORMAT", 2)
    monkeypatch.setattr(phase_state, "installed_version", lambda _: "0.9.0")
    write(tmp_path, 2)
    monkeypatch.undo()
    message = r"step-00000002 is a state of format 2, .* reads format 1: .* wrote it, rlhf 0\.9\.0$"
    with pytest.raises(CapabilityError, match=message):
        find_latest_intact_checkpoint(tmp_path, pytest.fail)


def test_tensors_of_a_link_are_not_read(tmp_path: Path) -> None:
    """A stranger's checkpoint could bring a model of the reader into an exported model."""
    mine, folder = write(tmp_path / "mine", 1), write(tmp_path / "run", 1)
    (folder / "model/more.safetensors").symlink_to(mine / "model/model.safetensors")
    read = load_checkpoint(folder).build_tensor_reader("model")
    assert len(read("weights/b", slice(None))) == len(TENSORS["weights/b"])


def test_latest_comes_first(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        write(tmp_path, step)
    names = [path.name for path in checkpoint_folders(tmp_path)]
    assert names == ["step-00000100", "step-00000010", "step-00000009"]


DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"flipped at {share}": partial(flip, share=share) for share in (0.0, 0.3, 0.6, 0.99)},
    "torn": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("name", ["model/model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_found_and_the_earlier_checkpoint_used(
    name: str, damage: str, tmp_path: Path
) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2) / name
    DAMAGES[damage](path)
    said: list[str] = []
    found = find_latest_intact_checkpoint(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    (line,) = said
    assert line.startswith("warning: ")
    assert str(path.parent if name == "manifest.json" else path) in line
    assert line.endswith("The checkpoint is not used")


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path: Path) -> None:
    write(tmp_path, 2).rename(checkpoint_folder(tmp_path, 3))
    with pytest.raises(CheckpointError, match="is of step 2: it was renamed"):
        load_checkpoint(checkpoint_folder(tmp_path, 3))


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
    streams = {"model": [("weights/a", 0, torch.zeros(1 << 15))]}
    with pytest.raises(CheckpointError, match="Earlier checkpoints are intact"):
        write_checkpoint(small_drive, 2, streams, {"logs": {}}, wanted_bytes=1)
    assert checkpoint_folders(small_drive) == [earlier]
    assert load_checkpoint(earlier).step == 1
    assert [path.name for path in earlier.parent.iterdir()] == [earlier.name], "nothing is left"


def test_a_read_only_folder_is_named(small_drive: Path) -> None:
    earlier = write(small_drive, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_drive)], check=True)
    with pytest.raises(CheckpointError, match=r"cannot be written \(Read-only file system\)"):
        write(small_drive, 2)
    assert load_checkpoint(earlier).step == 1


def let_fail(
    monkeypatch: pytest.MonkeyPatch, find_error: Callable[[Path], str | None]
) -> list[float]:
    """Let safetensors fail with an error of a path; return the seconds that are waited."""
    save_file, waits = safetensors.torch.save_file, list[float]()

    def save(tensors: Any, path: Path, **options: Any) -> None:
        if (error := find_error(path)) is not None:
            raise SafetensorError(f"Error while serializing: I/O error: {error}")
        save_file(tensors, path, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", save)
    monkeypatch.setattr(atomic.time, "sleep", waits.append)
    return waits


def test_a_hiccup_of_the_drive_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = ["Stale file handle (os error 116)"] * 3
    waits = let_fail(monkeypatch, lambda _: errors.pop() if errors else None)
    assert load_checkpoint(write(tmp_path, 1)).step == 1
    assert waits == [0.5, 2.0, 8.0]


@dataclass(frozen=True)
class Thread(Ranks):
    """A rank that is a thread of this process."""

    values: list[Any] = field(default_factory=list)
    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    sent_bytes: list[int] = field(default_factory=list)

    def all_gather(self, here: Any) -> list[Any]:
        sent = pickle.dumps(here)
        self.sent_bytes.append(len(sent))
        self.values[self.rank] = sent
        self.meeting.wait()
        found = [pickle.loads(each) for each in self.values]
        self.meeting.wait()
        return found

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        assert op is torch.distributed.ReduceOp.MAX
        return torch.stack(self.all_gather(tensor)).amax(0)


def on_ranks(size: int, work: Callable[[Thread], Any]) -> list[Any]:
    """Return what ``work`` returns or raises on each of ``size`` ranks."""
    values, meeting = [None] * size, threading.Barrier(size, timeout=20)
    ranks = [Thread(rank, size, values=values, meeting=meeting) for rank in range(size)]
    found = [None] * size

    def run(each: Thread) -> None:
        try:
            found[each.rank] = work(each)
        except Exception as error:  # on all ranks
            found[each.rank] = error
        except BaseException as error:  # the rank is lost
            found[each.rank] = error
            meeting.abort()

    threads = [threading.Thread(target=run, args=(each,)) for each in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def share(ranks: Ranks, tensors: Mapping[str, torch.Tensor]) -> Iterator[TensorSlice]:
    """The slices of a rank, of which some are empty."""
    for name, tensor in tensors.items():
        start, stop = (len(tensor) * n // ranks.size for n in (ranks.rank, ranks.rank + 1))
        if start < stop:
            yield name, start, tensor[start:stop]


def write_by_all(phase_dir: Path, ranks: Ranks, tensors: Mapping[str, torch.Tensor]) -> None:
    streams = {"model": share(ranks, tensors)}
    write_checkpoint(phase_dir, 2, streams, {"logs": {}}, wanted_bytes=1, ranks=ranks)


@pytest.mark.parametrize("writers", [1, 2, 3])
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_any_number_of_ranks_reads_what_any_number_has_written(
    writers: int, readers: int, tmp_path: Path
) -> None:
    tensors = TENSORS | {"weights/c": torch.arange(2.0, dtype=torch.bfloat16)}
    assert (
        on_ranks(writers, lambda ranks: write_by_all(tmp_path, ranks, tensors)) == [None] * writers
    )
    folder = checkpoint_folder(tmp_path, 2)
    files = [f"rank-{n:05}/model.safetensors" for n in range(writers)]
    files = [f"model/{each}" for each in (files if writers > 1 else ["model.safetensors"])]
    assert [*json.loads((folder / "manifest.json").read_text())] == [*files, "state.json"]

    def read(ranks: Ranks) -> None:
        read_part = load_checkpoint(folder, ranks).build_tensor_reader("model")
        for name, start, expected in share(ranks, tensors):
            found = read_part(name, slice(start, start + len(expected)))
            assert found.dtype == expected.dtype
            assert found.equal(expected)
        assert len(read_part("weights/a", slice(6, 6))) == 0
        assert read_part("weights/a", slice(None)).equal(tensors["weights/a"])

    assert on_ranks(readers, read) == [None] * readers


def test_a_rank_holds_and_sends_no_more_than_a_block_and_writes_no_more_than_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at the door: what safetensors gets, and what goes to other ranks."""
    written, save_file = dict[str, list[int]](), safetensors.torch.save_file

    def save(tensors: Mapping[str, torch.Tensor], path: Path, **options: Any) -> None:
        written.setdefault(path.parent.name, []).append(sum(t.nbytes for t in tensors.values()))
        save_file(dict(tensors), path, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", save)
    monkeypatch.setattr(phase_state, "RANK_FILE_BYTES", 6000)
    tensors = {str(number): torch.ones(3000) for number in range(9)}  # 4000 bytes on each rank

    def save_all(ranks: Thread) -> int:
        write_by_all(tmp_path, ranks, tensors)
        return max(ranks.sent_bytes)

    assert max(on_ranks(3, save_all)) < 2000
    assert written == {f"rank-{rank:05}": [4000] * 9 for rank in range(3)}


def test_all_ranks_beat_while_one_of_them_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that the rank has written, or flushed and hashed, a file."""
    beats = Counter[int]()
    monkeypatch.setattr(ranks_module, "beat", lambda: beats.update([threading.get_ident()]))
    monkeypatch.setattr(phase_state, "RANK_FILE_BYTES", 1)

    def save(ranks: Thread) -> int:
        streams = {"model": ((str(n), 0, torch.ones(2)) for n in range(3 if ranks.rank else 0))}
        write_checkpoint(tmp_path, 2, streams, {"logs": {}}, wanted_bytes=1, ranks=ranks)
        return beats[threading.get_ident()]

    for found in on_ranks(3, save):
        assert found >= 3 + 4, "three files; their index is hashed too"


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_damage_to_the_file_of_one_rank_is_refused_by_name_on_all(
    damage: str, tmp_path: Path
) -> None:
    earlier = write(tmp_path, 1)
    on_ranks(3, lambda ranks: write_by_all(tmp_path, ranks, TENSORS))
    path = checkpoint_folder(tmp_path, 2) / "model" / "rank-00001" / "model.safetensors"
    flip(path, 0.99) if damage == "flipped" else path.unlink()
    said: list[str] = []

    def find(ranks: Ranks) -> Path | None:
        found = find_latest_intact_checkpoint(tmp_path, said.append, ranks)
        return found and found.folder

    assert on_ranks(2, find) == [earlier] * 2
    assert len(said) == 2
    assert all(line.startswith(f"warning: {path} is ") for line in said)


def test_a_rank_that_dies_in_the_middle_of_a_save_leaves_the_earlier_checkpoint(
    tmp_path: Path,
) -> None:
    earlier = write(tmp_path, 1)

    def save(ranks: Ranks) -> None:
        def dying() -> Iterator[TensorSlice]:
            yield from share(ranks, TENSORS)
            if ranks.rank == 1:
                raise SystemExit

        write_checkpoint(tmp_path, 2, {"model": dying()}, {"logs": {}}, wanted_bytes=1, ranks=ranks)

    found = on_ranks(3, save)
    assert [type(each) for each in found].count(SystemExit) == 1
    assert None not in found
    assert checkpoint_folders(tmp_path) == [earlier]
    assert load_checkpoint(earlier).step == 1


@pytest.mark.parametrize(
    ("number", "kind", "waited", "said"),
    [
        (errno.ESTALE, SkippedError, [0.5, 2.0, 8.0], "step-00000002: the checkpoint is skipped"),
        (errno.ENOSPC, CheckpointError, [], "step-00000002: the checkpoint cannot be written"),
    ],
)
def test_a_long_hiccup_skips_the_checkpoint_on_all_ranks_and_a_full_drive_does_not(
    number: int,
    kind: type[Exception],
    waited: list[float],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier, error = write(tmp_path, 1), f"{os.strerror(number)} (os error {number})"
    waits = let_fail(monkeypatch, lambda path: error if path.parent.name == "rank-00001" else None)
    errors = on_ranks(3, lambda ranks: write_by_all(tmp_path, ranks, TENSORS))
    assert [type(each) for each in errors] == [kind] * 3
    assert all(said in str(each) and os.strerror(number) in str(each) for each in errors)
    assert waits == waited
    assert list(earlier.parent.iterdir()) == [earlier], "nothing is left"
