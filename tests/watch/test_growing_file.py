"""Files that grow, are cut and are replaced while they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf.base.stored_files import GrowingFile

FORM = {"step": int}


def text(*steps: int) -> str:
    return "".join(f'{{"step": {step}}}\n' for step in steps)


def steps_read(file: GrowingFile) -> tuple[list[int], bool]:
    values, is_restarted = file.read()
    return [value["step"] for value in values], is_restarted


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_each_line_is_read_once_and_a_half_line_when_it_is_whole(path: Path) -> None:
    file = GrowingFile(path, FORM)
    assert steps_read(file) == ([], False)
    with path.open("w", buffering=1) as writer:
        writer.write(text(1, 2) + '{"st')
        writer.flush()
        assert steps_read(file) == ([1, 2], False)
        assert steps_read(file) == ([], False)
        writer.write('ep": 3}')
        writer.flush()
        assert steps_read(file) == ([], False)
        writer.write("\n" + text(4))
    assert steps_read(file) == ([3, 4], False)


@pytest.mark.parametrize("more", [[], [30], [*range(30, 90)]])
def test_a_file_that_a_resumed_run_cut_is_read_again(path: Path, more: list[int]) -> None:
    file = GrowingFile(path, FORM)
    path.write_text(text(*range(30)))
    file.read()
    os.truncate(path, len(text(*range(20))))
    with path.open("a") as writer:  # the cut is not seen before the file is longer than it was
        writer.write(text(*more))
    assert steps_read(file) == ([*range(20), *more], True)
    assert steps_read(file) == ([], False)


def test_a_file_that_was_replaced_or_removed_is_read_again(path: Path) -> None:
    file = GrowingFile(path, FORM)
    path.write_text(text(1, 2, 3))
    file.read()
    path.unlink()
    assert steps_read(file) == ([], True)
    path.write_text(text(1, 2, 4, 5))
    assert steps_read(file) == ([1, 2, 4, 5], False)


def test_a_damaged_line_is_named_and_skipped(path: Path) -> None:
    file = GrowingFile(path, FORM)
    path.write_text(text(1) + '{"step": "x"}\n\nno JSON\n' + text(2))
    assert steps_read(file) == ([1, 2], False)
    assert file.fault is not None
    assert "line 2: step is not a whole number" in file.fault
    path.write_text(text(7))
    assert steps_read(file) == ([7], True)
    assert file.fault is None


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text(text(1))
    path.symlink_to(tmp_path / "other")
    file = GrowingFile(path, FORM)
    assert steps_read(file) == ([], False)
    assert file.fault is not None
    assert "it is a link" in file.fault
