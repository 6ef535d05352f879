"""Files, links and folders are replaced whole, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf import atomic
from rlhf.atomic import replacing


def a_file(path: Path, text: str) -> None:
    path.write_text(text)


def a_folder(path: Path, text: str) -> None:
    path.mkdir()
    (path / "inside").write_text(text)


def a_link(path: Path, text: str) -> None:
    path.symlink_to(text)


def content(path: Path) -> str:
    if path.is_symlink():
        return path.readlink().as_posix()
    return (path / "inside" if path.is_dir() else path).read_text()


def replace(path: Path, make: Callable[[Path, str], None], text: str, *, fails: bool) -> None:
    with replacing(path) as building:
        make(building, text)
        if fails:
            raise RuntimeError("stopped half way")


@pytest.mark.parametrize("make", [a_file, a_folder, a_link])
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


def test_writers_at_the_same_time_have_files_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "thing"
    with replacing(path, shared=True) as building:
        assert building.parent == tmp_path
        assert not building.name.endswith(".building")
        building.write_text("mine")
    assert path.read_text() == "mine"


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
    with replacing(tmp_path / "x") as building:
        building.write_text("new")
    assert ((tmp_path / "x").read_text(), waits) == ("new", [0.5, 2.0])
    errors += [errno.ENOSPC]
    with pytest.raises(OSError, match="hiccup"), replacing(tmp_path / "x") as building:
        building.write_text("newer")
    assert ((tmp_path / "x").read_text(), waits) == ("new", [0.5, 2.0]), "a full drive stays full"
