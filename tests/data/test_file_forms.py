"""Files as people have them: compressed, in sub-folders, snapshots of the hub."""

import bz2
import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from rlhf.base.errors import DataError
from rlhf.config.choices import Source
from rlhf.data.reading import describe_dataset, load_datasets
from rlhf.options.ptx.corpus import load_ptx_texts
from tests.data.test_reading import config_of, load, prompts

README = """---
license: mit
configs:
- config_name: first
  default: true
  data_files:
  - {split: train, path: "data/a-*.jsonl.gz"}
  - {split: dev, path: data/test.jsonl}
- config_name: second
  data_files: data/test.jsonl
---
# Pets
"""


def lines(*prompts: str) -> bytes:
    return "".join(json.dumps({"prompt": each}) + "\n" for each in prompts).encode()


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def table(*prompts: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"prompt": prompts}), sink)
    return sink.getvalue().to_pybytes()


A, B, AB = lines("a"), lines("b"), lines("a", "b")
A_GZ, B_GZ = gzip.compress(A), gzip.compress(B)
ROWS = [{"prompt": "a"}, {"prompt": "b"}]
ARRAY, PRINTED = json.dumps(ROWS).encode(), json.dumps(ROWS, indent=2).encode()
# Content of each file of a folder, the prompts to train on and those held out.
Form = tuple[dict[str, bytes], str, str]
FORMS: dict[str, Form] = {
    "gz": ({"x.jsonl.gz": gzip.compress(AB)}, "ab", ""),
    "gz of two parts": ({"x.jsonl.gz": A_GZ + B_GZ}, "ab", ""),
    "bz2": ({"x.JSON.BZ2": bz2.compress(AB)}, "ab", ""),
    "zst": ({"x.jsonl.zst": zstd(AB)}, "ab", ""),
    "csv.gz": ({"x.csv.gz": gzip.compress(b"prompt,n\na,1\nb,2\n")}, "ab", ""),
    "tsv.zst": ({"x.tsv.zst": zstd(b"\xef\xbb\xbfprompt\tn\na\t1\n")}, "a", ""),
    "array": ({"x.jsonl": ARRAY}, "ab", ""),
    "printed array": ({"x.jsonl": b"\n" + PRINTED}, "ab", ""),
    "array.gz": ({"x.jsonl.gz": gzip.compress(ARRAY)}, "ab", ""),
    "Excel": ({"x.csv": b"sep=;\nprompt;n\na;1\nb;2\n"}, "ab", ""),
    "Excel, commas": ({"x.csv": b"sep=,\nprompt,n\na,1\nb,2\n"}, "ab", ""),
    "old line ends": ({"x.jsonl": AB.replace(b"\n", b"\r")}, "ab", ""),
    "sub-folder": ({"data/train.parquet": table("a"), "data/val-0.parquet": table("b")}, "a", "b"),
    "folders": ({"train/0.jsonl": A, "held_out/0.jsonl": B, "old/0.json": A}, "aa", "b"),
    "name first": ({"test/train.jsonl": A, "train/x-eval.jsonl": B}, "a", "b"),
    "HH": ({"base/train.jsonl.gz": A_GZ, "base/test.jsonl.gz": B_GZ}, "a", "b"),
    "hidden files": ({"a.jsonl": A, ".b.jsonl": B, ".cache/c.json": b"{}"}, "a", ""),
    "README": (
        {"README.md": README.encode(), "data/a-0.jsonl.gz": A_GZ, "data/test.jsonl": B,
         "data/other.jsonl": AB, "info.json": b"{}"}, "a", "b",
    ),
    **{
        name: ({"train.jsonl": A, f"{name}.jsonl": B}, "a", "b")
        for name in "valid dev eval my-validation dev-00000-of-00001 HH.Val2 testset".split()
    },
    **{
        name: ({"train.jsonl": A, f"{name}.jsonl": B}, "ab", "")
        for name in "values train_dev validated".split()
    },
    "latest": ({"train.jsonl": A, "latest.jsonl": B}, "ba", ""),
    "README without configs": ({"README.md": b"---\nlicense: mit\n---\n", "x.jsonl": AB}, "ab", ""),
}  # fmt: skip


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_forms_of_files(form: Form, tmp_path: Path) -> None:
    files, train, held_out = form
    found = load(fill(tmp_path, files))
    assert "".join(map(str, prompts(found.train))) == train
    assert "".join(map(str, prompts(found.eval))) == held_out


def test_sides_are_printed_with_the_folders(tmp_path: Path) -> None:
    files = {"data/train-0.jsonl": A, "dev/0.jsonl": B}
    line = describe_dataset(load(fill(tmp_path, files)))
    assert line.endswith("trains on data/train-0.jsonl, holds out dev/0.jsonl")


def snapshot(folder: Path) -> Path:
    """Two snapshots in a folder of the hub's cache, whose files are links; main is the second."""
    cache = fill(folder, {"refs/main": b"22\n", "blobs/x": A, "blobs/y": B})
    for commit, blob in (("11", "x"), ("22", "y")):
        (cache / "snapshots" / commit / "data").mkdir(parents=True)
        link = cache / "snapshots" / commit / "data" / "train.jsonl"
        link.symlink_to(f"../../../blobs/{blob}")
    return cache


def test_the_folder_of_a_data_set_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    cache = snapshot(tmp_path)
    assert prompts(load(cache).train) == ["b"]
    assert prompts(load(cache / "snapshots" / "11").train) == ["a"]


def test_a_readme_gives_the_splits_of_a_hub_data_set(tmp_path: Path) -> None:
    folder = fill(tmp_path, FORMS["README"][0])
    found = load(folder, source=Source.hub, eval_split="dev")
    assert (prompts(found.train), prompts(found.eval)) == (["a"], ["b"])
    assert prompts(load(folder, subset="second").train) == ["b"]


def test_nested_columns_of_parquet_are_messages(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": said}] * 3), tmp_path / "x.parquet")
    found = load(tmp_path)
    assert [record.chosen for record in found.train] == [" b"] * 3
    assert found.left_out.total() == 0


def test_nan_is_a_missing_value(tmp_path: Path) -> None:
    rows = '{"prompt": "a", "chosen": "b", "rejected": NaN, "n": Infinity}'
    (record,) = load(fill(tmp_path, {"x.jsonl": rows.encode()})).train  # 31
    assert (record.chosen, record.rejected) == (" b", None)


def test_a_corpus_may_be_compressed(tmp_path: Path) -> None:
    fill(tmp_path, {"a.txt.gz": gzip.compress(b"one\n\ntwo"), "eval/b.txt": b"three"})
    texts, held_out = load_ptx_texts(config_of(None, ptx_path=str(tmp_path)), seed=0)
    assert (sorted(texts), held_out) == (["one", "two"], ["three"])


REFUSED: dict[str, tuple[dict[str, bytes], list[str]]] = {
    "cut off": ({"x.jsonl.gz": gzip.compress(AB)[:-9]}, ["x.jsonl.gz: cannot be read (", "end"]),
    "not gz": ({"x.jsonl.gz": AB}, ["x.jsonl.gz: cannot be read (", "gzip"]),
    "not zst": ({"x.jsonl.zst": AB}, ["x.jsonl.zst: cannot be read (", "ZSTD"]),
    "row": ({"d/x.jsonl.gz": gzip.compress(A + b"{")}, ["d/x.jsonl.gz, row 2: not JSON"]),
    "parquet.gz": ({"x.parquet.gz": b""}, ["no file that can", "x.parquet.gz: unpack it first"]),
    "row on two lines": ({"x.jsonl": b'{\n"prompt": "a"}\n'}, ["row 1: not JSON", "a file .json"]),
    "long row": ({"x.csv": b"sep=;\nprompt;n\na;b;c\n"}, ["3 fields for 2 columns"]),
    "UTF-16": ({"x.jsonl": A.decode().encode("utf-16")}, ["not UTF-8 text"]),
    "zip": ({"d/x.zip": b""}, ["supported: .jsonl", ".gz or .bz2 or .zst", "x.zip: unpack it"]),
    "rows in an array": ({"x.jsonl": b"[1]\n" + A}, ["x.jsonl, row 1: of type list; a row must"]),
    "configs": (
        {"README.md": README.replace("  default: true\n", "").encode(), "data/test.jsonl": A,
         "data/a-.jsonl.gz": b""},
        ["README.md: its configs cannot be used (", "'first', 'second'", "data.subset=NAME"],
    ),
    "no such files": ({"README.md": README.encode()}, ["README.md: its configs cannot be used ("]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_files_that_are_refused(case: tuple[dict[str, bytes], list[str]], tmp_path: Path) -> None:
    files, parts = case
    with pytest.raises(DataError) as refused:
        load_datasets(config_of(fill(tmp_path, files)), seed=0)
    assert [part for part in parts if part not in str(refused.value)] == [], refused.value


def test_nothing_is_written_outside_temporary_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", home)
    load(fill(tmp_path / "data", FORMS["README"][0]))
    assert not home.exists()
