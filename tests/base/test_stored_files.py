"""Damaged and hostile files of a run directory: refused by name and place, never a traceback."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from rlhf.base import stored_files
from rlhf.base.stored_files import (
    DEEPEST,
    METRICS,
    PHASES,
    RESULT,
    SAMPLES,
    DamagedFileError,
    copy_regular_files,
    find_files,
    iterate_files,
    read_bytes,
    read_json,
    read_json_lines,
)

MEASURED = {"hours": 0.1, "memory_gib": 1.0}
SFT = {"perplexity_before": 9.0, "perplexity_after": None, "seconds": 3, "measured": MEASURED}
WHOLE = {"objective": -2.0, "phases": {"sft": SFT}, "versions": {}, "measured": MEASURED}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"objective": 1', "not JSON"),
        (b"", "not JSON"),
        (b"[]", "the content is not an object"),
        (b"5", "the content is not an object"),
        (b"null", "the content is not an object"),
        (b"{}", "objective is missing"),
        (b"[" * 100_000, "not JSON"),
        (b'{"n": ' + b"1" * 5000 + b"}", "not JSON"),
        (b'{"x": ' + b"[" * DEEPEST + b"]" * DEEPEST + b"}", f"it has more than {DEEPEST} levels"),
        (json.dumps(WHOLE).encode("utf-16"), "not JSON in UTF-8"),
        ({"objective": "high"}, "objective is not a number"),
        ({"objective": True}, "objective is not a number"),
        ({"objective": 10**300}, "objective is not a number"),
        ({"phases": {"sft": []}}, "phases.sft is not an object"),
        ({"phases": {"sft": {"measured": MEASURED}}}, "phases.sft.seconds is missing"),
        ({"phases": {"sft": SFT | {"kl_before": 1}}}, "phases.sft.kl_after is missing"),
        ({"phases": {"sft": SFT | {"score_gain_ci": [1]}}}, "phases.sft.score_gain_ci is not a li"),
    ],
)
def test_a_damaged_result_is_refused_by_its_place(
    content: bytes | dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    is_other = isinstance(content, dict)  # other values in a whole result
    path.write_bytes(json.dumps(WHOLE | content).encode() if is_other else content)
    with pytest.raises(DamagedFileError) as caught:
        RESULT.read(tmp_path)
    assert str(caught.value).startswith(f"{path} is damaged, or no run wrote it: {reason}")


def test_what_a_run_writes_is_read(tmp_path: Path) -> None:
    assert RESULT.read(tmp_path) is None
    (tmp_path / RESULT).write_text(json.dumps(WHOLE))
    assert RESULT.read(tmp_path) == WHOLE
    (tmp_path / "b.json").write_text(json.dumps(SFT | {"perplexity_after": math.nan}))
    assert read_json(tmp_path / "b.json", PHASES["sft"]) == SFT, "NaN of an older run is null"


def link(path: Path) -> None:
    path.with_name("secret").write_text("{}")
    path.symlink_to("secret")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, link])
def test_only_regular_files_are_read(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "result.json")
    with pytest.raises(DamagedFileError, match=r"result\.json is damaged"):
        read_bytes(tmp_path / "result.json")


def test_a_file_or_a_line_is_read_up_to_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of a sparse file is no measure of what its folder takes."""
    (tmp_path / RESULT).touch()
    os.truncate(tmp_path / RESULT, stored_files.PARSE_LIMIT + 1)
    with pytest.raises(DamagedFileError, match="more than 67,108,864 bytes"):
        RESULT.read(tmp_path)
    monkeypatch.setattr(stored_files, "PARSE_LIMIT", len(LINE))
    (tmp_path / METRICS).write_bytes(LINE + LINE)
    assert len(list(METRICS.read_lines(tmp_path))) == 2
    (tmp_path / METRICS).write_bytes(LINE + b" " + LINE)
    with pytest.raises(DamagedFileError, match="a line of more than"):
        list(METRICS.read_lines(tmp_path))


LINE = b'{"phase": "sft", "step": 1, "sft/loss": 2.5}\n'


@pytest.mark.parametrize(
    "bad",
    [
        b"{}\n",
        b"[1]\n",
        b"null\n",
        b'{"phase": ["sft"], "step": 1}\n',
        b'{"phase": "sft", "step": 1.5}\n',
        b'{"phase": "sft", "step": 1, "sft/loss": "low"}\n',
        b'{"phase": "sft", "st\n',
        b"\xff\xfe\n",
    ],
)
def test_a_damaged_line_is_refused_by_its_number(bad: bytes, tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(LINE + bad + LINE)
    with pytest.raises(DamagedFileError, match="line 2"):
        list(METRICS.read_lines(tmp_path))
    (tmp_path / METRICS).write_bytes(LINE + bad)
    with pytest.raises(DamagedFileError, match="line 2"):
        list(METRICS.read_lines(tmp_path))


@pytest.mark.parametrize("torn", [b"", b"{", b"12", b'{"phase": "sft\xc3', b"\n\n"])
def test_lines_are_read_up_to_a_torn_one(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / METRICS
    assert list(METRICS.read_lines(tmp_path)) == []
    path.write_bytes(LINE + torn)
    assert list(METRICS.read_lines(tmp_path)) == [{"phase": "sft", "step": 1, "sft/loss": 2.5}]
    text = json.dumps(
        {"phase": "ppo", "step": 0, "prompt": "x\u2028y", "response": "\ud83d"}, ensure_ascii=False
    )
    path.write_bytes(text.encode("utf-8", errors="backslashreplace"))
    assert [line["response"] for line in read_json_lines(path, SAMPLES.form)] == ["\ud83d"]


def test_a_link_is_neither_copied_nor_a_file_of_its_folder(tmp_path: Path) -> None:
    """Nor is the folder itself followed: a run's tokenizer may be a link to somebody's secrets."""
    mine, run = tmp_path / "mine", tmp_path / "run"
    for folder in (mine, run):
        folder.mkdir()
    (mine / "secret").write_text("x")
    (run / "own").write_text("x")
    (run / "linked").symlink_to(mine / "secret")
    (tmp_path / "tokenizer").symlink_to(mine)
    assert list(iterate_files(run)) == ["own"]
    assert find_files(tmp_path, "*/*") == [mine / "secret", run / "own"]
    for source in (run, tmp_path / "tokenizer"):
        with pytest.raises(DamagedFileError, match="only regular files are copied"):
            copy_regular_files(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
