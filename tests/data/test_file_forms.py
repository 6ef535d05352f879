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
from rlhf.data.reading import describe_dataset
from rlhf.options.ptx.corpus import load_ptx_texts
from tests.data.row_tables import config_of, load, prompts

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
    rows = (json.dumps({"prompt": each}, ensure_ascii=False) for each in prompts)
    return "".join(f"{row}\n" for row in rows).encode()


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def table(*values: object) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"prompt": values}), sink)
    return sink.getvalue().to_pybytes()


A, B, AB = lines("a"), lines("b"), lines("a", "b")
A_GZ, B_GZ, BOM = gzip.compress(A), gzip.compress(B), b"\xef\xbb\xbf"
ROWS = [{"prompt": "a"}, {"prompt": "b"}]
ARRAY, PRINTED = json.dumps(ROWS).encode(), json.dumps(ROWS, indent=2).encode()
TALK = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
ASKED = "\n\nHuman: a\n\nAssistant:"
# Content of each file of a folder, the prompts to train on and those held out.
Form = tuple[dict[str, bytes], str, str]
FORMS: dict[str, Form] = {
    "gz of two parts": ({"x.jsonl.gz": A_GZ + B_GZ}, "ab", ""),
    "bz2": ({"x.JSON.BZ2": bz2.compress(AB)}, "ab", ""),
    "zst": ({"x.jsonl.zst": zstd(AB)}, "ab", ""),
    "csv.gz": ({"x.csv.gz": gzip.compress(b"prompt,n\na,1\nb,2\n")}, "ab", ""),
    "tsv.zst": ({"x.tsv.zst": zstd(BOM + b"prompt\tn\na\t1\n")}, "a", ""),
    "gz of another name": ({"x.jsonl": gzip.compress(AB)}, "ab", ""),
    "bz2 of another name": ({"x.json": bz2.compress(ARRAY)}, "ab", ""),
    "zst of another name": ({"x.csv": zstd(b"prompt\na\n")}, "a", ""),
    "UTF-16": ({"x.jsonl": AB.decode().encode("utf-16")}, "ab", ""),
    "UTF-16 without its mark": ({"x.json": ARRAY.decode().encode("utf-16-be")}, "ab", ""),
    "UTF-16, compressed": ({"x.jsonl.gz": gzip.compress(A.decode().encode("utf-16-le"))}, "a", ""),
    "Excel's Unicode text": (
        {"x.csv": "prompt\tn\r\na\t1\r\n\xe4\t2\r\n".encode("utf-16")}, "a\xe4", ""
    ),
    "array": ({"x.jsonl": ARRAY}, "ab", ""),
    "printed array": ({"x.jsonl": b"\n" + PRINTED}, "ab", ""),
    "array.gz": ({"x.jsonl.gz": gzip.compress(ARRAY)}, "ab", ""),
    "array of a key": ({"x.json": b'{"data": ' + ARRAY + b"}"}, "ab", ""),
    "lines of JSON": ({"x.json": BOM + b"\n" + AB.replace(b"\n", b"\r\n").strip()}, "ab", ""),
    "one object": ({"x.json": A}, "a", ""),
    "one object whose only key is a column": ({"x.json": TALK}, ASKED, ""),
    "conversations": ({"x.json": TALK + b"\n" + TALK}, ASKED * 2, ""),
    "ends of lines of other formats": ({"x.json": lines("a\u2028b", "c\x85")}, "a\u2028bc\x85", ""),
    "byte order mark": ({"x.jsonl": BOM + AB, "y.csv": BOM + b"prompt\na\n"}, "aba", ""),
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
        name: ({"pets.json": ARRAY, f"{name}.json": b'{"pets": {"splits": []}}'}, "ab", "")
        for name in "dataset_info dataset_infos config".split()
    },
    **{
        name: ({"train.jsonl": A, f"{name}.jsonl": B}, "a", "b")
        for name in "valid dev eval my-validation dev-00000-of-00001 HH.Val2 testset".split()
    },
    **{
        name: ({"train.jsonl": A, f"{name}.jsonl": B}, "ab", "")
        for name in "values train_dev validated".split()
    },
    "held-out files alone": ({"test-a.jsonl": A, "test-b.jsonl": B}, "ab", ""),
    "other files": ({"train.json": A, "Test.jsonl": B, "eval_1.json": A, "a.md": b""}, "a", "ba"),
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


@pytest.mark.parametrize("form", ["clone", "./clone", "../{here}/clone", "link", "../{here}/link"])
def test_a_clone_of_the_hub_is_read_from_a_relative_path(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "clone", FORMS["README"][0])
    (tmp_path / "link").symlink_to("clone")
    monkeypatch.chdir(tmp_path)
    found = load(form.format(here=tmp_path.name))
    assert (prompts(found.train), prompts(found.eval)) == (["a"], ["b"])
    assert "trains on data/a-0.jsonl.gz, holds out data/test.jsonl" in describe_dataset(found)


def test_a_corpus_may_be_compressed(tmp_path: Path) -> None:
    fill(tmp_path, {"a.txt.gz": gzip.compress(b"one\n\ntwo"), "eval/b.txt": b"three"})
    texts, held_out = load_ptx_texts(config_of(None, ptx_path=str(tmp_path)), seed=0)
    assert (sorted(texts), held_out) == (["one", "two"], ["three"])


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
ROW, LONG = '{"prompt": "a"}', "9" * 5000
NO_DEFAULT = README.replace("  default: true\n", "").encode()
# A file, its content, and a regular expression for the refusal.
REFUSED: list[tuple[str, str | bytes, str]] = [
    ("a.jsonl", f"{ROW}\n\n{{'x'\n", r"a\.jsonl, row 3: not JSON: .* at character 2\.$"),
    ("a.jsonl", f"{ROW}\n[1]\n", r"a\.jsonl, row 2: of type list; a row must be an object\."),
    ("a.jsonl", f'{ROW}\n{{"prompt": 5}}', r"a\.jsonl, row 2: column 'prompt' .* type int;"),
    ("a.jsonl", "", r"a\.jsonl: empty; must have at least one row\.$"),
    ("a.jsonl", '{"q": 1}', r"a\.jsonl: no known layout has the columns q\.\n.*human\(QUES"),
    ("a.jsonl", '{"prompt": ""}', r"a\.jsonl: no row can be used: 1 skipped \(1 prompt is em"),
    ("a.jsonl", '{"a": 1\n', r"a\.jsonl, row 1: not JSON: .* at character 8\.$"),
    ("a.jsonl", '{\n"prompt": "a"}\n', r"row 1: not JSON.*a file \.json"),
    ("a.jsonl", f"[1]\n{ROW}", r"a\.jsonl, row 1: of type list; a row must"),
    ("a.jsonl", f'{ROW}\n{{"text": {LONG}}}\n', r"a\.jsonl, row 2: .*5000 digits"),
    ("a.jsonl", '{"text": "a", "text": "b"}\n', r"a\.jsonl, row 1: .*'text' twice"),
    ("a.jsonl", '{"prompt": "\xe4"}'.encode("latin-1"), "not UTF-8 text"),
    *(
        (f"a.{kind}", LFS, rf"a\.{kind}: is a Git LFS pointer, not the file: run `git lfs pull`")
        for kind in ("jsonl", "json", "csv", "parquet", "jsonl.gz")
    ),
    ("a.json", "", r"a\.json: empty"),
    ("a.json", "[{]", r"a\.json: not JSON: .* at line 1, character 3\.$"),
    ("a.json", f"[{ROW}, 7]", r"a\.json, row 2: of type int; a row must be an object"),
    ("a.json", f"{ROW}\n{{\n", r"a\.json, row 2: not JSON"),
    ("a.json", '{"q": "a"}', r"a\.json: no known layout has the columns q\.\n.*'human\(q\)'"),
    ("a.json", '"prompt"', r"a\.json, row 1: of type str; a row must be an object"),
    ("a.json", f'[{{"text": {LONG}}}]', r"a\.json: .*5000 digits"),
    ("a.json", '[{"text": "a", "n": {"x": 1, "x": 2}}]', r"a\.json: .*'x' twice"),
    ("a.csv", "", r"a\.csv: empty"),
    ("a.csv", "prompt,x\na,b\n\nc\n", r"a\.csv, row 2: 1 fields for 2 columns \(prompt, x\)"),
    ("a.csv", "prompt,prompt\na,b\n", r"a\.csv: the header names a column twice: prompt, pro"),
    ("a.csv", 'prompt\na\n"b', r"a\.csv, row 2: unexpected end of data \(texts of over 131072"),
    ("a.csv", "prompt;chosen\na;b;c\n", r"3 fields for 2 columns \(prompt, chosen\).* by ';'"),
    ("a.csv", "prompt\tchosen\na\tb\tc\n", r"row 1: 3 fields for 2 columns .* by '\\t': put"),
    ("a.csv", "sep=;\nprompt;n\na;b;c\n", "3 fields for 2 columns"),
    ("a.parquet", "prompt", r"a\.parquet: not a parquet file \("),
    ("a.parquet", table(5), r"a\.parquet, row 1: column 'prompt'"),
    (
        "a.txt",
        "a",
        r"no file that can be read; supported: \.jsonl, \.json, \.csv, \.tsv, \.parquet",
    ),
    ("a.zip", "", r"supported: \.jsonl.* \.gz or \.bz2 or \.zst.*a\.zip: unpack it"),
    ("a.parquet.gz", "", r"no file that can.*a\.parquet\.gz: unpack it first"),
    # mtime=0: tests are named after these bytes, and every worker must find the same names
    ("a.jsonl.gz", gzip.compress(AB, mtime=0)[:-9], r"a\.jsonl\.gz: cannot be read \(.*end"),
    ("a.jsonl.gz", AB, r"a\.jsonl\.gz: cannot be read \(.*gzip"),
    ("a.jsonl.zst", AB, r"a\.jsonl\.zst: cannot be read \(.*ZSTD"),
    ("d/a.jsonl.gz", gzip.compress(A + b"{", mtime=0), r"d/a\.jsonl\.gz, row 2: not JSON"),
    ("README.md", NO_DEFAULT, r"README\.md: its configs .*'first', 'second'.*data\.subset=NAME"),
    ("README.md", README, r"README\.md: its configs cannot be used \("),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_files_that_are_refused(
    name: str, content: str | bytes, message: str, tmp_path: Path
) -> None:
    files = FORMS["README"][0] if content == NO_DEFAULT else {}
    content = content.encode() if isinstance(content, str) else content
    with pytest.raises(DataError, match=rf"(?s){message}"):
        load(fill(tmp_path, files | {name: content}))


def test_nothing_is_written_outside_temporary_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", home)
    load(fill(tmp_path / "data", FORMS["README"][0]))
    assert not home.exists()
