"""Bundles: one file of a run without its weights, and the run that somebody else gets from it."""

import json
import os
import random
import shutil
import stat
import struct
import tracemalloc
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import pytest
import yaml

from rlhf.base.errors import RlhfError
from rlhf.base.hashing import sha256_of
from rlhf.base.stored_files import file_identity
from rlhf.report.__main__ import main as report
from rlhf.runs.__main__ import main as runs
from rlhf_lab import bundle
from rlhf_lab.bundle import import_bundle
from tests.documents import read_document
from tests.test_export import Hub
from tests.watch.watched import append, sample

Capture = pytest.CaptureFixture[str]
TOKEN, REVISION = "hf_" + "a" * 30, "0123456789" * 4


@pytest.fixture(scope="module")
def bundled(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a finished run."""
    file = tmp_path_factory.mktemp("bundled") / "best.zip"
    assert bundle.main([str(tiny_run), str(file)]) == 0
    return file


@pytest.fixture
def own(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in the home folder of a user, without its weights."""
    without = shutil.ignore_patterns("*.safetensors", "tokenizer*")
    run = tmp_path / "home" / "ann" / "runs" / "first"
    shutil.copytree(tiny_run, run, ignore=without)
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "ann"))
    return run


def content(file: Path) -> dict[str, bytes]:
    with ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_bundle_has_everything_but_the_weights(
    tiny_run: Path, bundled: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert bundle.main([str(tiny_run), str(tmp_path / "again.zip")]) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "again.zip").read_bytes() == bundled.read_bytes()
    with ZipFile(bundled) as archive:
        assert {each.date_time for each in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    members = content(bundled)
    about = json.loads(members.pop("bundle.json"))
    whole = "config.yaml command.txt metrics.jsonl samples.jsonl result.json report.html"
    for name in whole.split():
        assert members[name] == (tiny_run / name).read_bytes()
    for phase, model in (("sft", "model"), ("reward", "model"), ("ppo", "actor")):
        names = {"manifest.json", "result.json", f"{model}/README.md"}
        assert {f"{phase}/{name}" for name in names} <= members.keys()
        listed = json.loads(members[f"{phase}/manifest.json"])["files"]
        weights = tiny_run / phase / model / "model.safetensors"
        assert listed[f"{model}/model.safetensors"] == file_identity(weights)
    assert "ppo/held_out.json" in members
    assert not {name for name in members if "safetensors" in name or "tokenizer" in name}
    assert about["files"].keys() == members.keys()
    assert f"{len(members)} files of the run. The models are left out" in said


def test_no_secret_and_no_home_folder_is_in_a_bundle(own: Path, tmp_path: Path) -> None:
    home = str(Path.home())
    config = (own / "config.yaml").read_text()
    assert "  revision: null\n" in config
    config = config.replace("  revision: null\n", f"  revision: {REVISION}\n")
    (own / "config.yaml").write_text(config)
    paths = {"data.path": {f"{home}/a.jsonl": [1, "ab"], f"{home}a/b.jsonl": [1, "cd"]}}
    (own / "inputs.json").write_text(json.dumps(paths))
    append(own / "samples.jsonl", [sample(1, f"my key is {TOKEN}")])
    (own / "notes.md").write_text("not of the run")
    (own / "ppo" / "state").mkdir(exist_ok=True)
    (own / "ppo" / "state" / "state.json").write_text("{}")
    before = (own / "samples.jsonl").read_bytes()
    assert bundle.main([str(own), str(tmp_path / "own.zip")]) == 0
    members = content(tmp_path / "own.zip")
    for name, text in members.items():
        assert TOKEN.encode() not in text, name
        assert home.encode() not in text.replace(f"{home}a".encode(), b""), name
    assert members["samples.jsonl"] == before.replace(TOKEN.encode(), b"[redacted]")
    assert REVISION.encode() in members["config.yaml"]
    (files,) = json.loads(members["inputs.json"]).values()
    assert list(files) == ["~/a.jsonl", f"{home}a/b.jsonl"]
    about = json.loads(members["bundle.json"])
    assert about["run"] == "~/runs/first"
    assert about["changed"]["samples.jsonl"] == file_identity(own / "samples.jsonl")
    assert "metrics.jsonl" not in about["changed"]
    assert not {"notes.md", "ppo/state/state.json"} & members.keys()


def test_an_import_never_holds_a_whole_file(bundled: Path, tmp_path: Path) -> None:
    zeros = {"ppo/zeros.json": bytes(1 << 25)}
    members = content(bundled) | zeros
    about = json.loads(members["bundle.json"])
    about["files"] |= {name: [len(each), sha256_of(each)] for name, each in zeros.items()}
    members["bundle.json"] = json.dumps(about).encode()
    with ZipFile(tmp_path / "zeros.zip", "w", ZIP_DEFLATED) as archive:
        for name, each in members.items():
            archive.writestr(name, each)
    tracemalloc.start()
    import_bundle(tmp_path / "zeros.zip", tmp_path / "run")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "run" / "ppo" / "zeros.json").stat().st_size == 1 << 25
    assert peak < 1 << 24


def test_an_imported_run_stands_beside_ones_own(
    tiny_run: Path, bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert bundle.main(["import", str(bundled), "--json"]) == 0
    (row,) = read_document("runs", capsys.readouterr().out)["runs"]
    assert row["folder"] == "runs/imported/best"
    assert row["imported_from"] == str(tiny_run)
    assert runs([str(tiny_run), "runs", "--json"]) == 0
    rows = read_document("runs", capsys.readouterr().out)["runs"]
    own, other = sorted(rows, key=lambda each: each["imported_from"] or "")
    assert own["imported_from"] is None
    varying = ("folder", "imported_from", "bytes")
    assert own == other | {key: own[key] for key in varying}
    assert runs([]) == 0
    assert f"finished, imported, was {tiny_run}, began " in capsys.readouterr().out
    assert runs(["diff", str(tiny_run), row["folder"], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == found["results"] == {}
    assert report([row["folder"]]) == 0
    capsys.readouterr()
    assert report([str(tiny_run), row["folder"], "--json"]) == 0
    compared = read_document("report", capsys.readouterr().out)
    assert [each["runs"] for each in compared["settings"]] == [[str(tiny_run)], [row["folder"]]]


def test_the_tree_of_imported_runs_is_that_of_their_owner(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    child = own.with_name("second")
    shutil.copytree(own, child)
    text = (child / "config.yaml").read_text()
    assert "from_run: null" in text
    (child / "config.yaml").write_text(text.replace("from_run: null", f"from_run: {own}"))
    (child / "result.json").unlink()
    (child / "run.lock").write_text(f"process 999999999 on {os.uname().nodename}\n")
    (child / "output.log").write_text(f"error: {Path.home()}/x: no such file\n")
    monkeypatch.chdir(tmp_path)
    for run in (own, child):
        assert bundle.main([str(run), f"{run.name}.zip"]) == 0
        assert bundle.main(["import", f"{run.name}.zip"]) == 0
    capsys.readouterr()
    assert runs(["tree"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("runs/imported/first  finished")
    assert second.startswith("  runs/imported/second  failed")
    assert runs(["name=*", "state=failed", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["reason"] == "error: ~/x: no such file"
    assert bundle.main(["runs/imported/first", "b.zip"]) == 2
    assert "it was imported; pass on the file that it came from" in capsys.readouterr().err


Change = Callable[[dict[str, bytes]], object]


def listed(members: dict[str, bytes], name: str) -> None:
    """Add a file that bundle.json lists, as whoever writes a bundle by hand can."""
    about = json.loads(members["bundle.json"])
    about["files"][name] = about["files"]["config.yaml"]
    members |= {"bundle.json": json.dumps(about).encode(), name: members["config.yaml"]}


def told(members: dict[str, bytes], **values: Any) -> None:
    about = json.loads(members["bundle.json"]) | values
    members["bundle.json"] = json.dumps(about).encode()


# What was done to the members of a bundle, and what the refusal says.
BAD: dict[str, tuple[Change, str]] = {
    "foreign": (dict.clear, "it has no bundle.json"),
    "without a list": (lambda all_: all_.pop("bundle.json"), "it has no bundle.json"),
    "list of another form": (lambda all_: told(all_, files=3), "bundle.json: files is not an obj"),
    "no JSON": (lambda all_: all_.update({"bundle.json": b"{"}), "bundle.json: not JSON"),
    "changed": (lambda all_: all_.update({"config.yaml": b"x"}), "config.yaml in it differs from"),
    "missing": (lambda all_: all_.pop("metrics.jsonl"), "bundle.json does not match"),
    "one more": (lambda all_: all_.update({"x.json": b"{}"}), "bundle.json does not match"),
    "no time": (lambda all_: told(all_, started=1e50), "bundle.json does not match"),
    "traversal": (lambda all_: listed(all_, "../evil.json"), "'../evil.json' is not a file that"),
    "inner": (lambda all_: listed(all_, "ppo/../../evil.json"), "is not a file that"),
    "absolute": (lambda all_: listed(all_, "/tmp/evil.json"), "'/tmp/evil.json' is not a file"),
    "code": (lambda all_: listed(all_, "sitecustomize.py"), "is not a file that"),
    "hidden": (lambda all_: listed(all_, ".netrc.json"), "is not a file that"),
    "line end": (lambda all_: listed(all_, "a.json\n"), "is not a file that"),
    "weights": (lambda all_: listed(all_, "ppo/actor/model.safetensors"), "is not a file that"),
}


def refused(file: Path, said: str, capsys: Capture, *more: str) -> None:
    """Import a file that must be refused, with all parts of a refusal, and leave nothing."""
    capsys.readouterr()
    before = sorted(Path.cwd().rglob("*"))
    assert bundle.main(["import", str(file), *more, "--json"]) == 2
    error = read_document("runs", capsys.readouterr().out)["error"]
    assert error["key"] == str(file)
    assert said in error["rule"]
    assert "rlhf_lab.bundle RUN_DIR FILE" in error["remedy"]
    left = {path for path in Path.cwd().rglob("*")} - {*before}
    assert left <= {Path.cwd() / "runs", Path.cwd() / "runs" / "imported"}
    assert not Path("/tmp/evil.json").exists()


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_bundle_is_refused_and_leaves_nothing(
    name: str, bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    change, said = BAD[name]
    members = content(bundled)
    change(members)
    with ZipFile("a.zip", "w") as archive:
        for each, text in members.items():
            archive.writestr(each, text)
    refused(Path("a.zip"), said, capsys)


def test_files_of_other_kinds_are_refused(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.zip").write_text("no archive")
    refused(Path("text.zip"), "File is not a zip file", capsys)
    refused(Path("gone.zip"), "No such file", capsys)
    twice = BytesIO(bundled.read_bytes())
    with ZipFile(twice, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("metrics.jsonl", "{}")
    Path("twice.zip").write_bytes(twice.getvalue())
    refused(Path("twice.zip"), "bundle.json does not match", capsys)
    monkeypatch.setattr(bundle, "MOST_CONTENTS", 900)  # bundle.json is read whole
    refused(bundled, "bundle.json is larger than 900 bytes", capsys)
    monkeypatch.setattr(bundle, "MOST_BYTES", 1000)
    refused(bundled, "its files are larger than 1,000 bytes", capsys)


def test_a_link_in_a_bundle_is_unpacked_as_text(bundled: Path, tmp_path: Path) -> None:
    members = content(bundled)
    with ZipFile(tmp_path / "a.zip", "w") as archive:
        for name, text in members.items():
            member = ZipInfo(name)
            member.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(member, text)
    (tmp_path / "link.zip").symlink_to("a.zip")  # as in the hub's cache
    import_bundle(tmp_path / "link.zip", tmp_path / "run")
    for name, text in members.items():
        assert not (tmp_path / "run" / name).is_symlink()
        assert (tmp_path / "run" / name).read_bytes() == text


def test_a_size_that_is_a_lie_fills_no_drive(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A member that unpacks to more than its header says ends at the size that the header says."""
    monkeypatch.chdir(tmp_path)
    members = content(bundled)
    with ZipFile("a.zip", "w", 8) as archive:
        for name, text in members.items():
            archive.writestr(name, b"\0" * 10**7 if name == "metrics.jsonl" else text)
    is_size, told_size = (struct.pack("<L", n) for n in (10**7, len(members["metrics.jsonl"])))
    Path("a.zip").write_bytes(Path("a.zip").read_bytes().replace(is_size, told_size))
    refused(Path("a.zip"), "damaged", capsys)


def test_no_flipped_byte_is_unpacked(bundled: Path, tmp_path: Path) -> None:
    draw, whole, members = random.Random(3), bundled.read_bytes(), content(bundled)
    file, folder = tmp_path / "a.zip", tmp_path / "run"
    refusals = 0
    for _ in range(100):
        place = draw.randrange(len(whole))
        flipped = bytes([whole[place] ^ 1 << draw.randrange(8)])
        file.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        try:
            import_bundle(file, folder)
        except RlhfError:
            refusals += 1
            assert not folder.exists()
            continue
        files = [path for path in folder.rglob("*") if path.is_file()]
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        assert found == members, place
        shutil.rmtree(folder)
    assert refusals > 80
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip"]


def test_what_exists_is_not_replaced(bundled: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run").mkdir()
    assert bundle.main(["import", str(bundled), str(tmp_path / "run")]) == 2
    assert "it exists; give another folder" in capsys.readouterr().err
    assert not any((tmp_path / "run").iterdir())
    assert runs(["import", "a.zip"]) == 2
    assert "use python -m rlhf_lab.bundle import of rlhf-lab" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.tar"], "a.tar: must be a new file; name one that ends in .zip"),
        (["old.zip"], "old.zip: must be a new file"),
        (["a.zip", "--push", "me"], "--push me: must be OWNER/NAME"),
    ],
)
def test_what_cannot_be_bundled_is_refused(
    words: list[str],
    said: str,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.zip").write_text("mine")
    assert bundle.main([str(tiny_run), *words]) == 2
    assert said in capsys.readouterr().err
    assert bundle.main([".", "a.zip"]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["old.zip"]


def test_a_file_that_is_a_link_is_not_bundled(own: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "secret.json").write_text('"secret"')
    (own / "x.json").symlink_to(tmp_path / "secret.json")
    assert bundle.main([str(own), str(tmp_path / "a.zip")]) == 2
    assert "it is a link" in capsys.readouterr().err
    assert not (tmp_path / "a.zip").exists()


def test_the_hub_gets_a_data_set_with_a_card(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    hub = Hub(monkeypatch)
    file = tmp_path / "own.zip"
    assert bundle.main([str(own), str(file), "--push", "me/pets"]) == 0
    assert "uploaded to https://hub.example/me/pets" in capsys.readouterr().out
    assert hub.kinds == {"dataset"}
    assert hub.asked == [("create", True), ("upload", {"README.md", "own.zip"})]
    header, text = hub.card.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(header) == {"pretty_name": "me/pets", "tags": ["rlhf"], "viewer": False}
    assert "python -m rlhf_lab.bundle import own.zip\n" in text
    assert "python launch.py experiment=smoke " in text
    assert "hf download --repo-type dataset me/pets own.zip " in text
    assert str(Path.home()) not in text
