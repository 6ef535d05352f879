"""Files that other programs made badly, or that are no files: a message with the place."""

import os
import re
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from rlhf.base.errors import ConfigError, DataError
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.tables import read_table_rows
from rlhf.options.ptx.corpus import load_ptx_texts
from tests.data.row_tables import config_of, load, pairs_of, write
from tests.fuzz.case import Case, Verdict, judged


def refusal(act: Callable[[], object]) -> str:
    """The message of the refusal, in a process of its own: the input could hang the test."""
    verdict, text = judged(Case("input", act), seconds=10)
    assert verdict is Verdict.refused, text
    return text


def parquet_file(path: Path, **columns: pa.Array) -> Path:
    parquet.write_table(pa.table({"text": ["a"], **columns}), path)
    return path


def test_a_parquet_column_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    far = pa.array([2**62], pa.timestamp("us"))
    with pytest.raises(DataError, match=r"a.parquet: column 'when' cannot be read as .*range"):
        load(parquet_file(tmp_path / "a.parquet", when=far))
    zone = pa.array([0], pa.timestamp("us", tz="Mars/Olympus"))
    named = r"b.parquet: column 'when' cannot be read as .*Mars/Olympus"
    with pytest.raises(DataError, match=named):
        load(parquet_file(tmp_path / "b.parquet", when=zone))
    good = pa.array([datetime(2026, 1, 1, tzinfo=UTC)])
    assert len(load(parquet_file(tmp_path / "c.parquet", when=good)).train) == 1


def test_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([["a"], ["b"]], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: two columns are named 'text'"):
        load(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("train/state.json", "[]"),
        ("train/dataset_info.json", "{"),
        ("train/state.json", "{}"),
        ("train/state.json", '{"_data_files": 5}'),
        ("dataset_dict.json", '{"splits": ["train", "gone"]}'),
    ],
)
def test_damaged_save_to_disk_folders(file: str, content: str, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(pairs_of("a"))
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / file).write_text(content)
    with pytest.raises(DataError, match="not a readable save_to_disk folder"):
        load(tmp_path / "saved")
    with pytest.raises(DataError, match=r"data.ptx_path.*not a readable save_to_disk folder"):
        load_ptx_texts(config_of(None, ptx_path=str(tmp_path / "saved")), seed=0)


def test_saved_rows_that_cannot_be_read(tmp_path: Path) -> None:
    table = pa.table({"text": ["a"], "when": pa.array([2**62], pa.timestamp("us"))})
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"saved, split train: cannot be read"):
        load(tmp_path / "saved")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path has 108 bytes at most
        server.bind(path.name)
        os.chdir(here)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "socket": make_socket,
    "folder": os.mkdir,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize(("kind", "name"), [*product(SPECIAL, ["a.jsonl"]), ("FIFO", "a.parquet")])
def test_only_regular_files_are_opened(kind: str, name: str, tmp_path: Path) -> None:
    SPECIAL[kind](tmp_path / name)
    message = f"{tmp_path / name}: must be a regular file."
    assert refusal(lambda: load(tmp_path)) == message
    assert refusal(lambda: read_table_rows(tmp_path)) == message  # of rlhf.compare --answers
    ptx = config_of(None, ptx_path=str(tmp_path))
    assert refusal(lambda: load_ptx_texts(ptx, seed=0)) == f"data.ptx_path: {message}"


@pytest.mark.parametrize(
    ("kind", "name"), [("FIFO", "state.json"), ("link to a device", "data-00000-of-00001.arrow")]
)
def test_saved_folders_hold_regular_files(kind: str, name: str, tmp_path: Path) -> None:
    datasets.Dataset.from_list(pairs_of("a")).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / name).unlink()
    SPECIAL[kind](tmp_path / "saved" / name)
    assert f"{name}: must be a regular file" in refusal(lambda: load(tmp_path / "saved"))


def test_held_out_files_are_regular_files(tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", pairs_of("a"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    message = f"{tmp_path / 'pipe.jsonl'}: must be a file or a folder."
    assert refusal(lambda: load(good, eval_path=str(tmp_path / "pipe.jsonl"))) == message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x" * 300 + ".jsonl", "not a usable path (File name too long"),
        ("a\0b.jsonl", "not a usable path (embedded null byte"),
    ],
)
def test_paths_that_cannot_be(path: str, message: str, tmp_path: Path) -> None:
    good = str(write(tmp_path / "a.jsonl", pairs_of("a")))
    named = {"mine": DatasetConfig(path=path)}
    for key, act in {
        "data.path": lambda: load(path),
        "data.eval_path": lambda: load(good, eval_path=path),
        "data.sets.mine.path": lambda: load(None, sets=named),
        "data.ptx_path": lambda: load_ptx_texts(config_of(None, ptx_path=path), seed=0),
    }.items():
        with pytest.raises(ConfigError, match=re.escape(f"{key}={path}: {message}")):
            act()
