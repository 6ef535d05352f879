"""Files, links and folders are replaced whole, or not at all."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf.base import atomic
from rlhf.base.atomic import await_path, replace_atomically


def a_file(path: Path, text: str) -> None:
    path.write_text(text)


def a_folder(path: Path, text: str) -> None:
    path.mkdir()
    (path / "inside").write_text(text)


def content(path: Path) -> str:
    if path.is_symlink():
        return path.readlink().as_posix()
    return (path / "inside" if path.is_dir() else path).read_text()


def replace(path: Path, make: Callable[[Path, str], None], text: str, *, fails: bool) -> None:
    with replace_atomically(path) as building:
        make(building, text)
        if fails:
            raise RuntimeError("stopped half way")


@pytest.mark.parametrize("make", [a_file, a_folder, Path.symlink_to])
def test_new_content_comes_whole_or_not_at_all(
    tmp_path: Path, make: Callable[[Path, str], None]
) -> None:
    path = tmp_path / "thing"
    replace(path, make, "old", fails=False)
    with pytest.raises(RuntimeError, match="half way"):
        replace(path, make, "new", fails=True)
    assert content(path) == "old"
    replace(path, make, "new", fails=False)
    assert content(path) == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["thing"]


@pytest.mark.parametrize("make", [a_file, a_folder])
def test_what_a_killed_process_left_is_removed(
    tmp_path: Path, make: Callable[[Path, str], None]
) -> None:
    make(tmp_path / ".thing.building", "half")
    replace(tmp_path / "thing", make, "new", fails=False)
    assert [each.name for each in tmp_path.iterdir()] == ["thing"]


def test_what_a_network_drive_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, waits, errors = os.fsync, list[float](), [errno.EIO, errno.ESTALE]

    def flaky(descriptor: int) -> None:
        if errors:
            raise OSError(errors.pop(), "hiccup")
        fsync(descriptor)

    monkeypatch.setattr(atomic.time, "sleep", waits.append)
    monkeypatch.setattr(os, "fsync", flaky)
    with replace_atomically(tmp_path / "x") as building:
        building.write_text("new")
    assert ((tmp_path / "x").read_text(), waits) == ("new", [0.5, 2.0])
    errors += [errno.ENOSPC]
    with pytest.raises(OSError, match="hiccup"), replace_atomically(tmp_path / "x") as building:
        building.write_text("newer")
    assert ((tmp_path / "x").read_text(), waits) == ("new", [0.5, 2.0]), "a full drive stays full"


def dies_at(moment: int, path: Path, patch: pytest.MonkeyPatch, *, may_exchange: bool) -> bool:
    """Replace the folder ``path`` in a process that dies before its ``moment``-th change on disk.

    Return True if it died, False if it made fewer changes.
    """
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] != 0
    changes = 0

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes == moment:
                os._exit(1)
            return change(*arguments, **options)

        return changed

    try:
        for owner, name in ((shutil, "rmtree"), (Path, "replace"), (Path, "unlink")):
            patch.setattr(owner, name, dying(getattr(owner, name)))
        exchange = atomic._exchange_paths if may_exchange else lambda *_: False
        patch.setattr(atomic, "_exchange_paths", dying(exchange))
        replace(path, a_folder, "new", fails=False)
    finally:
        os._exit(0)


@pytest.mark.parametrize("may_exchange", [True, False])
def test_a_kill_loses_neither_the_old_folder_nor_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_exchange: bool
) -> None:
    moment, path = 1, tmp_path / "thing"
    replace(path, a_folder, "old", fails=False)
    while dies_at(moment, path, monkeypatch, may_exchange=may_exchange):
        if not may_exchange:  # between its two renames there is neither, until the next attempt
            with pytest.raises(RuntimeError):
                replace(path, a_folder, "newer", fails=True)
        assert content(path) in {"old", "new"}
        replace(path, a_folder, "old", fails=False)  # removes what was left
        assert [each.name for each in tmp_path.iterdir()] == ["thing"]
        moment += 1
    assert moment > 2 + (not may_exchange)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),  # as file.write raises it
        Exception("No space left on device (os error 28)"),  # as tokenizers raises it
        shutil.Error([("a", "b", "[Errno 28] No space left on device")]),
    ],
)
def test_an_error_names_the_file_that_was_to_be_written(tmp_path: Path, error: Exception) -> None:
    a_folder(tmp_path / "model", "old")
    with (
        pytest.raises(OSError, match="No space left") as caught,
        replace_atomically(tmp_path / "model"),
    ):
        raise error
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "model"))
    with (
        pytest.raises(OSError, match="No") as caught,
        replace_atomically(tmp_path / "model") as building,
    ):
        (building / "inside").write_text("not made")
    assert caught.value.filename == str(tmp_path / "model/inside")


def test_a_read_only_drive_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    a_file(tmp_path / ".thing.building", "left by a killed process")
    monkeypatch.setattr(Path, "unlink", refuse)
    with (
        pytest.raises(OSError, match="Read-only") as caught,
        replace_atomically(tmp_path / "thing"),
    ):
        pytest.fail("nothing can be written here")
    assert caught.value.filename == str(tmp_path / "thing")


def test_a_path_that_an_nfs_client_has_missed_is_seen_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, a missing path stays missing here until the folder above it is opened again."""
    missed, stat, scandir = set(), os.stat, os.scandir

    def remembering_stat(path: str | Path, **options: Any) -> os.stat_result:
        if Path(path) in missed:
            raise FileNotFoundError(errno.ENOENT, "remembered", str(path))
        try:
            return stat(path, **options)
        except FileNotFoundError:
            missed.add(Path(path))
            raise

    def forgetting_scandir(folder: str | Path) -> Any:
        if Path(folder) in missed:
            raise FileNotFoundError(errno.ENOENT, "remembered", str(folder))
        missed.difference_update([each for each in missed if each.parent == Path(folder)])
        return scandir(folder)

    monkeypatch.setattr(os, "stat", remembering_stat)
    monkeypatch.setattr(os, "scandir", forgetting_scandir)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    result = tmp_path / "sft" / "result.json"
    assert not result.parent.exists()
    assert not result.exists()
    result.parent.mkdir()
    result.write_text("{}")
    assert not result.exists()
    await_path(result, 5)
    with pytest.raises(FileNotFoundError) as caught:
        await_path(tmp_path / "reward", 0)
    assert str(caught.value.filename) == str(tmp_path / "reward")
