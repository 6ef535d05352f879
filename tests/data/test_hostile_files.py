"""Files that other programs made badly, or that are no files: a message with the place."""

import os
import re
import socket
from collections.abc import Callable
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


FAR = pa.array([2**62], pa.timestamp("us"))
# Tables of one row, and why their parquet files are refused.
TABLES = {
    "column 'when' cannot be read as .*range": {"text": pa.array(["a"]), "when": FAR},
    "column 'when' cannot be read as .*Mars/Olympus": {
        "text": pa.array(["a"]),
        "when": pa.array([0], pa.timestamp("us", tz="Mars/Olympus")),
    },
    "two columns are named 'text'": {"text": pa.array(["a"]), "text ": pa.array(["b"])},
}


@pytest.mark.parametrize("reason", TABLES)
def test_a_parquet_column_that_cannot_be_read_is_named(reason: str, tmp_path: Path) -> None:
    columns = TABLES[reason]
    table = pa.table([*columns.values()], names=[name.strip() for name in columns])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a.parquet: {reason}"):
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
    datasets.Dataset(pa.table({"text": ["a"], "when": FAR})).save_to_disk(tmp_path / "saved")
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
    if kind == "FIFO":
        path = str(tmp_path / name)
        assert refusal(lambda: load(path)) == f"{path}: must be a file or a folder."


@pytest.mark.parametrize(
    ("kind", "name"), [("FIFO", "state.json"), ("link to a device", "data-00000-of-00001.arrow")]
)
def test_saved_folders_hold_regular_files(kind: str, name: str, tmp_path: Path) -> None:
    datasets.Dataset.from_list(pairs_of("a")).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / name).unlink()
    SPECIAL[kind](tmp_path / "saved" / name)
    assert f"{name}: must be a regular file" in refusal(lambda: load(tmp_path / "saved"))


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
