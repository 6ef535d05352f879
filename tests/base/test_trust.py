"""What another user of the machine could have written is not used."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.base.cpu import cache_folder
from rlhf.base.trust import REMEMBERED, is_remembered, is_trusted, remember

OTHER = 12_345  # a user, and a group, that is not ours
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "one" / "two" / "file"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def link_of(path: Path, owner: int) -> None:
    """Replace ``path`` by a link of ``owner`` to what it was."""
    real = path.rename(path.with_name("real"))
    path.symlink_to(real)
    os.chown(path, owner, owner, follow_symlinks=False)


def give_to_group(path: Path) -> None:
    os.chown(path, -1, OTHER)
    path.chmod(0o775)


def test_own_files_are_trusted_also_through_own_links_and_in_temporary_folders(file: Path) -> None:
    assert is_trusted(file)
    assert is_trusted(file.parent)
    file.parents[1].chmod(0o1777)
    assert is_trusted(file)
    link_of(file.parent, os.getuid())
    assert is_trusted(file)
    with pytest.raises(FileNotFoundError):
        is_trusted(file.with_name("missing"))


@pytest.mark.parametrize("above", [0, 1, 2])
def test_what_others_may_write_in_is_not_trusted(above: int, file: Path) -> None:
    path = [file, *file.parents][above]
    path.chmod(0o777)
    assert not is_trusted(file)
    path.chmod(0o1777)
    assert is_trusted(file) == (above > 0)
    assert not is_trusted(path)


@needs_root
@pytest.mark.parametrize("above", [0, 1, 2])
@pytest.mark.parametrize(
    "spoil",
    [give_to_group, lambda path: os.chown(path, OTHER, -1), lambda path: link_of(path, OTHER)],
    ids=["writable by a group", "owned by another", "a link of another to ours"],
)
def test_files_folders_and_links_of_others_are_not_trusted(
    spoil: Callable[[Path], None], above: int, file: Path
) -> None:
    spoil([file, *file.parents][above])
    assert not is_trusted(file)


@needs_root
def test_a_link_behind_an_own_link_is_checked(file: Path, tmp_path: Path) -> None:
    link_of(file.parent, OTHER)
    own = tmp_path / "own"
    own.symlink_to(file.parent)
    assert not is_trusted(own / file.name)


def test_what_is_remembered_where_others_can_write_is_forgotten(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user would consent in this user's name."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    assert not is_remembered(file)
    remember(file)
    assert is_remembered(file)
    (cache_folder() / REMEMBERED).chmod(0o777)
    assert not is_remembered(file)


def test_a_private_group_may_write_and_a_shared_one_may_not(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.chmod(0o664)
    group = SimpleNamespace(gr_name="me", gr_mem=["me"])
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr("grp.getgrgid", lambda _: group)
    assert is_trusted(file)
    group.gr_mem = ["me", "somebody"]
    assert not is_trusted(file)
