"""Write a run without its weights to one file, and unpack such a file as the directory of a run.

    python -m rlhf_lab.bundle RUN_DIR FILE.zip                      write the bundle of a run
    python -m rlhf_lab.bundle RUN_DIR FILE.zip --push OWNER/NAME    and upload it as a data set
    python -m rlhf_lab.bundle import FILE.zip [FOLDER]              unpack a bundle

A bundle is a .zip file: files of the run directory under their own names, and ``bundle.json`` with
their sizes and hashes. The models are left out; the manifests of the phases have their sizes and
hashes. Only files whose names ``NAMES`` matches are written and unpacked, so a bundle from somebody
else brings no links, code or weights, and no file is written outside of the new folder.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from rlhf.base.atomic import replace_atomically
from rlhf.base.command import Result, build_command_parser, run_to_exit_code
from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.finite_numbers import format_json
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.hashing import sha256_of
from rlhf.base.safe_text import redact
from rlhf.base.stored_files import (
    BUNDLE,
    DamagedFileError,
    Identity,
    find_entries,
    open_regular_file,
    parse_json,
    read_stored_text,
)
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase
from rlhf.config.freeze import FROZEN, read_frozen_keys
from rlhf.config.run_dir import RUNS
from rlhf.run.console import Console
from rlhf.run.model_card import origin_sections, results_section
from rlhf.runs.registry import FoundRun

PHASES = "|".join(Phase)
NAMES = re.compile(
    rf"config\.yaml|command\.txt|report\.html|(?:{PHASES})/[\w-]+/README\.md|"
    rf"(?:(?:{PHASES}|evaluation)/)?[\w-][\w.-]*\.jsonl?",
    re.ASCII,
)
MOST_BYTES = 2**31  # of a bundle's files together, unpacked
MOST_CONTENTS = 2**24  # bytes of bundle.json, which is read whole
PIECE_BYTES = 2**20  # bytes that are unpacked at a time
LATEST_START = 2.0**33  # latest start of a run, seconds since 1970: the year 2242
READABLE = 0o644 << 16  # permissions of a file as a .zip file stores them


def write_bundle(run: FoundRun, file: Path) -> Mapping[str, Any]:
    """Write the bundle of a run to ``file``, and return the content of bundle.json.

    Secrets and the path of the home folder are replaced; ``changed`` in bundle.json lists the files
    that had them, with the sizes and hashes that these files have in the run.

    Raises:
        CheckpointError: if ``run`` is no run, or one of its files is damaged.
        ConfigError: if ``file`` exists or is no .zip, or the run was imported or is too large.
    """
    read_frozen_keys(run.folder)  # raises an error if the folder has no run
    if run.bundle is not None:
        raise ConfigError(f"{run.folder}: it was imported; pass on the file that it came from")
    if file.suffix != ".zip" or os.path.lexists(file):
        raise ConfigError(f"{file}: must be a new file; name one that ends in .zip")
    contents: dict[str, Any] = {
        "run": make_shareable(str(run.folder.resolve())),
        "started": run.started,
        "state": "ended" if run.state in {"running", "silent"} else run.state,
        "reason": make_shareable(run.reason),
        "files": {},
        "changed": {},
    }
    names = (path.relative_to(run.folder).as_posix() for path in find_entries(run.folder, "**/*"))
    with replace_atomically(file) as building, ZipFile(building, "w", ZIP_DEFLATED) as archive:
        for name in sorted(filter(NAMES.fullmatch, names)):
            original = (read_stored_text(run.folder / name, most=MOST_BYTES) or "").encode()
            content = make_shareable(original.decode()).encode()
            contents["files"][name] = _identity_of(content)
            if content != original:
                contents["changed"][name] = _identity_of(original)
            _add_member(archive, name, content)
        if sum(member.file_size for member in archive.infolist()) > MOST_BYTES:
            raise ConfigError(f"{run.folder}: its files are larger than {MOST_BYTES:,} bytes")
        _add_member(archive, BUNDLE.name, format_json(contents).encode())
    return contents


def _identity_of(content: bytes) -> Identity:
    return [len(content), sha256_of(content)]


def _add_member(archive: ZipFile, name: str, content: bytes) -> None:
    member = ZipInfo(name)  # dated 1980, whenever it is written
    member.external_attr = READABLE
    archive.writestr(member, content, ZIP_DEFLATED)


def make_shareable(text: str) -> str:
    """Return ``text`` with its secrets redacted, and ``~`` instead of the home folder."""
    home_folder = os.path.expanduser("~")  # "~" for a user without a home folder
    for home in {home_folder, os.path.realpath(home_folder)} - {"/", "~"}:
        text = re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", text)
    return redact(text, os.environ)


def build_bundle_card(run_dir: Path, hub_id: str, file: str) -> str:
    """Return README.md of the data set ``hub_id`` on the hub, which has the bundle ``file``."""
    from huggingface_hub import DatasetCardData

    header = DatasetCardData(pretty_name=hub_id, tags=["rlhf"], viewer=False).to_yaml()
    return make_shareable(
        f"---\n{header}\n---\n\n# {hub_id}\n\nThe record of a training run of `rlhf`, without its "
        "models: configuration, command, hashes of data and models, metrics, samples, answers and "
        f"report.\n\n```bash\nhf download --repo-type dataset {hub_id} {file} --local-dir .\n"
        f"python -m rlhf_lab.bundle import {file}\n```{origin_sections(run_dir, rows={})}"
        f"{results_section(run_dir)}\n"
    )


def import_bundle(file: Path, folder: Path) -> None:
    """Unpack the bundle ``file`` to the new directory ``folder``, completely or not at all.

    Raises:
        CheckpointError: if ``file`` is damaged, or no bundle.
        ConfigError: if ``folder`` exists.
    """
    if os.path.lexists(folder):
        raise ConfigError(f"{folder}: it exists; give another folder, as FILE FOLDER")
    pieces = _read_pieces(file)
    first = next(pieces)  # raises an error for a file that is no bundle, before a folder is created
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replace_atomically(folder) as building:
        for name, piece, started in chain([first], pieces):
            path = building / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as stream:
                stream.write(piece)
            os.utime(path, (started, started))


def _read_pieces(file: Path) -> Iterator[tuple[str, bytes, float]]:
    """Yield each file of a bundle in pieces, with its name and the run's start; bundle.json first.

    Raises:
        CheckpointError: before the first piece if ``file`` is no bundle; after a damaged file.
    """
    with (
        translate_errors(partial(_build_error, file)),
        open(file.resolve(), "rb", opener=open_regular_file) as stream,
        ZipFile(stream) as archive,
    ):
        contents = _read_contents(file, archive)
        for name in (BUNDLE.name, *contents["files"]):
            size, digest = 0, hashlib.sha256()
            with archive.open(name) as member:
                for piece in chain([b""], iter(partial(member.read, PIECE_BYTES), b"")):
                    size += len(piece)
                    digest.update(piece)
                    yield name, piece, contents["started"]
            if name != BUNDLE.name and [size, digest.hexdigest()] != contents["files"][name]:
                raise _build_error(file, f"{name} in it differs from its size or hash in {BUNDLE}")


def _read_contents(file: Path, archive: ZipFile) -> Mapping[str, Any]:
    """Return the content of bundle.json, after comparing it with the archive's list of files."""
    members = archive.infolist()
    names = sorted(member.filename for member in members)
    if BUNDLE.name not in names:
        raise _build_error(file, f"it has no {BUNDLE}")
    if sum(member.file_size for member in members) > MOST_BYTES:
        raise _build_error(file, f"its files are larger than {MOST_BYTES:,} bytes")
    if archive.getinfo(BUNDLE.name).file_size > MOST_CONTENTS:
        raise _build_error(file, f"{BUNDLE} is larger than {MOST_CONTENTS:,} bytes")
    try:
        contents: dict[str, Any] = parse_json(
            file, archive.read(BUNDLE.name), BUNDLE.form, f"{BUNDLE}: "
        )
    except DamagedFileError as error:
        raise _build_error(file, error.reason) from error
    if odd := [name for name in contents["files"] if not NAMES.fullmatch(name)]:
        raise _build_error(file, f"{odd[0]!r} is not a file that a bundle may contain")
    has_all = sorted([*contents["files"], BUNDLE.name]) == names and FROZEN in names
    if not has_all or not 0 <= contents["started"] < LATEST_START:
        raise _build_error(file, f"{BUNDLE} does not match the files in the archive")
    return contents


def _build_error(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: not the bundle of a run, or damaged: {reason}; ask for the file again: "
        "python -m rlhf_lab.bundle RUN_DIR FILE writes it"
    )


def main(arguments: Sequence[str]) -> int:
    """Write or unpack a bundle; return the exit code."""
    parser = build_command_parser("rlhf_lab.bundle", __doc__, has_json=True)
    if arguments[:1] == ["import"]:
        parser.add_argument("file", type=Path, metavar="FILE")
        parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER")
        options = parser.parse_args(arguments[1:])
        return run_to_exit_code(lambda: _import(options), as_json=options.json)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--push", metavar="OWNER/NAME", help="also upload the bundle as a data set")
    parser.add_argument("--public", action="store_true", help="upload to a public repository")
    options = parser.parse_args(arguments)
    return run_to_exit_code(lambda: _write(options), as_json=options.json)


def _write(options: argparse.Namespace) -> Result:
    console = Console()
    if options.push is not None and options.push.count("/") != 1:
        raise ConfigError(f"--push {options.push}: must be OWNER/NAME")
    run = FoundRun(expand_user_path(options.run_dir, key="RUN_DIR"))
    file = expand_user_path(options.file, key="FILE")
    bundle = write_bundle(run, file)
    console.say(
        f"wrote {file}: {len(bundle['files'])} files of the run. The models are left out; their "
        "sizes and hashes are in the bundle (PHASE/manifest.json)"
    )
    if bundle["changed"]:
        changed = ", ".join(bundle["changed"])
        console.say(f"secrets, or the path of the home folder, were replaced in {changed}")
    if options.push is not None:
        from rlhf.export import push_to_hub  # imports torch

        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            shutil.copy(file, folder)
            card = build_bundle_card(run.folder, options.push, file.name)
            (folder / "README.md").write_text(card, encoding="utf-8")
            address = push_to_hub(folder, options.push, public=options.public, repo_type="dataset")
        console.say(f"uploaded to {address}")
    return Result({"run": str(run.folder), "file": str(file)})


def _import(options: argparse.Namespace) -> Result:
    file = expand_user_path(options.file, key="FILE")
    folder = expand_user_path(options.folder or RUNS / "imported" / file.stem, key="FOLDER")
    import_bundle(file, folder)
    Console().say(
        f"imported {folder}; python -m rlhf.runs lists it, python -m rlhf.report RUN_DIR {folder} "
        "compares it with one of your runs"
    )
    return Result({"runs": [FoundRun(folder).as_json()]})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
