"""Files of JSON lines: what is written, and what survives a killed process."""

import errno
import json
import math
import os
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from rlhf.base import atomic
from rlhf.base.errors import CheckpointError
from rlhf.run import jsonl
from rlhf.run.jsonl import JsonlWriter, drop_lines_of_phases, truncate_file
from rlhf.run.trackers import FileTracker


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def write(path: Path, *records: dict[str, object]) -> None:
    writer = JsonlWriter(path)
    for record in records:
        writer.write(record)
    writer.close()


def test_each_line_is_there_before_the_file_is_closed_and_a_second_writer_appends(
    tmp_path: Path,
) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    writers = [JsonlWriter(path) for _ in range(2)]
    for step, writer in enumerate(writers):
        writer.write({"phase": "sft", "step": step})
        assert read(path)[step:] == [{"phase": "sft", "step": step}]
    for writer in writers:
        writer.close()


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    numbers: list[object] = [math.nan, 1.0, math.inf]
    write(tmp_path / "m.jsonl", {"a": -math.inf, "b": numbers, "c": {"d": math.nan}})
    expected = '{"a": null, "b": [null, 1.0, null], "c": {"d": null}}\n'
    assert (tmp_path / "m.jsonl").read_text() == expected


@pytest.mark.parametrize("text", ["two\nlines", "grüße 你好", "line\u2028separator", "half \ud83d"])
def test_any_text_comes_back_as_it_was(tmp_path: Path, text: str) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, {"phase": "ppo", "prompt": text}, {"phase": "sft", "prompt": text})
    assert [record["prompt"] for record in read(path)] == [text, text]
    drop_lines_of_phases(path, {"sft"})
    assert read(path) == [{"phase": "ppo", "prompt": text}]


def test_dropping_takes_the_unfinished_phases_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [{"phase": p, "step": s} for p in ("sft", "reward", "ppo") for s in (1, 2)]
    write(path, *lines)
    assert drop_lines_of_phases(path, {"reward", "ppo", "dpo"}) == {"reward", "ppo"}
    assert read(path) == lines[:2]
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


LINE = b'{"phase": "sft", "step": 1}'
TORN = [b'{"phase": "sft", "st', b"{", b"12", b'{"phase": "sft\xc3', b"\n\n"]


@pytest.mark.parametrize(
    ("content", "left"),
    [*((LINE + b"\n" + torn, LINE + b"\n") for torn in TORN), (LINE, LINE + b"\n"), (b"", b"")],
)
def test_a_torn_last_line_is_dropped_and_a_whole_one_kept(
    content: bytes, left: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    for each in (path, tmp_path / "none.jsonl"):
        drop_lines_of_phases(each, {"ppo"})
    assert path.read_bytes() == left
    assert list(tmp_path.iterdir()) == [path]


def test_a_broken_line_in_the_middle_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    text = '{"phase": "sft"}\n{"pha\n{"phase": "ppo"}\n'
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"m\.jsonl is damaged.*: line 2: not"):
        drop_lines_of_phases(path, {"ppo"})
    assert path.read_text() == text


def test_a_file_is_cut_to_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, {"step": 1}, {"step": 2})
    size = path.stat().st_size
    path.write_text(path.read_text() + '{"step": 3}\n{"st')
    truncate_file(path, size)
    truncate_file(path, size + 1)
    truncate_file(tmp_path / "none.jsonl", 0)
    assert read(path) == [{"step": 1}, {"step": 2}]


class Drive:
    """A network drive that refuses to open or write files while ``error`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: int | None = None
        self.passes = False  # while one waits
        self.waits: list[float] = []

        class File(FileIO):
            """A file on the drive, which writes half of what it refuses."""

            def write(file, data: Any) -> int:
                if self.error is not None:
                    FileIO.write(file, data[: len(data) // 2])
                self.refuse()
                return FileIO.write(file, data)

        def open_here(path: Path, mode: str, *, buffering: int, opener: Any) -> Any:
            assert (mode, buffering) == ("ab", 0)
            self.refuse()
            return File(path, mode, opener=opener)

        monkeypatch.setattr(jsonl, "open", open_here, raising=False)
        monkeypatch.setattr(atomic.time, "sleep", self.wait)

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        if self.passes:
            self.error = None

    def refuse(self) -> None:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Drive:
    return Drive(monkeypatch)


def test_a_hiccup_is_waited_for(drive: Drive, tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1})
    drive.error = errno.EIO
    drive.passes = True
    writer.write({"step": 2})
    assert drive.waits == [0.5]
    assert not writer.is_late
    writer.close()
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_lines_that_a_drive_refuses_come_late(drive: Drive, tmp_path: Path) -> None:
    said: list[str] = []
    tracker = FileTracker(tmp_path, said.append)
    for step in range(1, 5):
        drive.error = errno.ESTALE if step in {2, 3} else None
        tracker.log("sft", step, {"sft/loss": 1.0})
    assert drive.waits == [0.5, 2.0, 8.0], "the second line that comes late does not wait"
    (warning,) = said
    assert warning.startswith(f"warning: the drive refused {tmp_path}/metrics.jsonl several times")
    tracker.finish()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_full_drive_ends_the_run_with_the_reason(drive: Drive, tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    drive.error = errno.ENOSPC
    with pytest.raises(CheckpointError, match=r"m\.jsonl cannot be written \(No space left on"):
        writer.write({"step": 1})
    assert drive.waits == []
