"""Record the input files of a run; when the run is resumed, report files that have changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path

from rlhf.base.errors import DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.isolated_process import find_code_file
from rlhf.base.stored_files import INPUTS, file_identity
from rlhf.base.user_paths import expand_user_path
from rlhf.config.schema.run import RunConfig
from rlhf.data.files import find_reader
from rlhf.data.tables import SAMPLE, find_snapshot, has_configs, list_files
from rlhf.options import DataConfig
from rlhf.rewards.sealed import find_judge_files
from rlhf.run.results import Inputs, write_json

MORE_SUFFIXES = {".arrow", ".txt"}  # of input files that have no reader in rlhf/data/files.py
# Keys of options that name a file or code (MODULE:NAME).
OPTION_KEYS = ["environment.target", "data.ptx_path"]
# Keys of a part of ``rewards`` that name a file or code.
REWARD_KEYS = ["json_schema", "function", "rubric"]


def data_keys_and_paths(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys that name data sets, each with its value: a file, a folder or a hub id."""
    yield from ((f"data.sets.{name}.path", each.path) for name, each in data.sets.items())
    for key, value in (("data.path", data.path), ("data.eval_path", data.eval_path)):
        values = value if isinstance(value, list) else [] if value is None else [value]
        yield from ((key, path) for path in values if not path.startswith(SAMPLE))


def write_input_hashes(config: RunConfig, run_dir: Path) -> None:
    """Write the absolute paths and hashes of all files that the configuration names."""
    if inputs := _hash_inputs(config):
        write_json(run_dir / INPUTS, inputs)


def check_input_hashes(config: RunConfig, run_dir: Path) -> None:
    """Compare the input files with the hashes stored when the run began; print what code changed.

    Raises:
        DataError: if a file other than code has changed or is missing, or a relative path now
            names another file.
    """
    stored = INPUTS.read(run_dir)
    if stored is None:  # the run was given no file, or an older version began it
        return
    for key, files in _hash_inputs(config).items():
        before = stored.get(key, {})
        changed = sorted(
            path for path in before.keys() | files.keys() if before.get(path) != files.get(path)
        )
        if not changed:
            continue
        text = f"{key}: {', '.join(map(repr, changed))} changed since the run of {run_dir} began"
        if _is_code_key(key):
            sys.stderr.write(f"{text}; the run continues with the changed code\n")
            continue
        raise DataError(
            f"{text} with {', '.join(map(repr, sorted(before))) or 'no file'}: a resumed run must "
            "read the same data. Restore the files, resume in the folder in which the run began, "
            f"or begin another run: from_run={run_dir}"
        )


def _is_code_key(key: str) -> bool:
    return key.endswith((".function", ".target"))


def _hash_inputs(config: RunConfig) -> Inputs:
    named = [
        *data_keys_and_paths(config.data),
        *((key, attrgetter(key)(config)) for key in OPTION_KEYS),
        ("reward.groups_path", config.reward.groups_path),
        *(
            (f"rewards.{name}.{file}", getattr(each, file))
            for file in REWARD_KEYS
            for name, each in config.rewards.items()
        ),
        *(
            (f"rewards.{name}.sealed", str(root / path))
            for name, each in config.rewards.items()
            if each.sealed
            for root, paths in [find_judge_files(each)]
            for path in paths
        ),
    ]
    inputs: Inputs = {}
    for key, value in named:
        if value is not None:
            root = find_code_file(value) if _is_code_key(key) else expand_user_path(value, key=key)
            with translate_errors(partial(_unreadable_error, key, value)):
                files = {str(path.absolute()): file_identity(path) for path in _input_files(root)}
            inputs.setdefault(key, {}).update(files)
    return inputs


def _unreadable_error(key: str, value: str, reason: str) -> DataError:
    return DataError(f"{key}={value}: cannot be read ({reason})")


def _input_files(place: Path) -> Iterator[Path]:
    """Yield ``place`` if it is a file; if it is a folder, the data files in it and below it."""
    if place.is_file():
        yield place
    elif place.is_dir():
        for path in list_files(find_snapshot(place)):
            if find_reader(path) or path.suffix.lower() in MORE_SUFFIXES or has_configs(path):
                yield path
