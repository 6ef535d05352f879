"""Files of JSON lines: what is written, and what survives a killed process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import CheckpointError
from rlhf.tracking.jsonl import JsonlWriter, cut, drop_phases, read_jsonl


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def write(path: Path, *records: dict[str, object]) -> None:
    writer = JsonlWriter(path)
    for record in records:
        writer.write(record)
    writer.close()


def test_each_line_is_there_before_the_file_is_closed(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "new" / "metrics.jsonl")
    writer.write({"phase": "sft", "step": 1, "sft/loss": 2.5})
    assert read(tmp_path / "new" / "metrics.jsonl") == [
        {"phase": "sft", "step": 1, "sft/loss": 2.5}
    ]
    writer.close()


def test_a_second_writer_appends(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", {"step": 1})
    write(tmp_path / "m.jsonl", {"step": 2})
    assert read(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null(tmp_path: Path, value: float) -> None:
    write(tmp_path / "m.jsonl", {"a": value, "b": 1.0})
    assert (tmp_path / "m.jsonl").read_text() == '{"a": null, "b": 1.0}\n'
    write(tmp_path / "n.jsonl", {"a": [1.0, value], "b": {"c": value}})
    assert (tmp_path / "n.jsonl").read_text() == '{"a": [1.0, null], "b": {"c": null}}\n'


@pytest.mark.parametrize("text", ["two\nlines", "grüße 你好", "line\u2028separator", "half \ud83d"])
def test_any_text_comes_back_as_it_was(tmp_path: Path, text: str) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, {"phase": "ppo", "prompt": text}, {"phase": "sft", "prompt": text})
    assert [record["prompt"] for record in read(path)] == [text, text]
    drop_phases(path, {"sft"})
    assert read(path) == [{"phase": "ppo", "prompt": text}]


def test_dropping_takes_the_unfinished_phases_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [{"phase": p, "step": s} for p in ("sft", "reward", "ppo") for s in (1, 2)]
    write(path, *lines)
    drop_phases(path, {"reward", "ppo"})
    assert read(path) == lines[:2]
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize(
    "torn", [b'{"phase": "sft", "st', b"{", b"12", b'{"phase": "sft\xc3', b"\n\n"]
)
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"phase": "sft", "step": 1}\n' + torn)
    drop_phases(path, {"ppo"})
    assert path.read_bytes() == b'{"phase": "sft", "step": 1}\n'


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"phase": "sft", "step": 1}')
    drop_phases(path, {"ppo"})
    assert path.read_text() == '{"phase": "sft", "step": 1}\n'


def test_an_empty_file_and_no_file_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").touch()
    drop_phases(tmp_path / "m.jsonl", {"ppo"})
    drop_phases(tmp_path / "none.jsonl", {"ppo"})
    assert (tmp_path / "m.jsonl").read_bytes() == b""
    assert not (tmp_path / "none.jsonl").exists()


def test_a_broken_line_in_the_middle_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    text = '{"phase": "sft"}\n{"pha\n{"phase": "ppo"}\n'
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"m\.jsonl, line 2: not a JSON object"):
        drop_phases(path, {"ppo"})
    assert path.read_text() == text


def test_objects_are_read_up_to_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert list(read_jsonl(path)) == []
    path.write_text('{"a": "x\u2028y"}\n{"a": 2}\n{"a": ', encoding="utf-8")
    assert list(read_jsonl(path)) == [{"a": "x\u2028y"}, {"a": 2}]


def test_a_file_is_cut_to_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, {"step": 1}, {"step": 2})
    size = path.stat().st_size
    path.write_text(path.read_text() + '{"step": 3}\n{"st')
    cut(path, size)
    cut(path, size + 1)
    cut(tmp_path / "none.jsonl", 0)
    assert read(path) == [{"step": 1}, {"step": 2}]
