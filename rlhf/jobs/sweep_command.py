"""Read the commands of sweeps: ``python launch.py -m KEY=A,B`` and ``-m sweep=NAME``.

The name of a sweep's folder is derived from its command. The folder of each job is named by the
values that differ between jobs. The same command again therefore continues the sweep.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.types import RunMode
from omegaconf import OmegaConf

from rlhf.base.cpu import num_usable_cores
from rlhf.base.errors import ConfigError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.hashing import sha256_of
from rlhf.config.run_dir import SWEEPS
from rlhf.config.schema.keys import format_value
from rlhf.config.validation import refuse_secrets_in_command

MULTIRUN = frozenset({"-m", "--multirun"})
MOST_BYTES = 200  # longest folder name of a job; file systems allow 255 bytes
NAMED_BY = ("sweep", "experiment")  # keys whose value begins the name of a sweep's folder


def is_sweep(words: Sequence[str]) -> bool:
    """Return True if the command starts a sweep."""
    return not MULTIRUN.isdisjoint(words)


def expand_sweep(words: Sequence[str], definitions: Path) -> list[str]:
    """Replace ``sweep=NAME`` by the overrides in NAME.yaml; return the new words.

    A key that the command sets itself keeps the command's value.

    Raises:
        ConfigError: if NAME.yaml is missing or not a mapping, or the command lacks -m.
    """
    names = [word.removeprefix("sweep=") for word in words if word.startswith("sweep=")]
    if not names:
        return list(words)
    if not is_sweep(words):
        raise ConfigError(
            f"sweep={names[0]} is for several runs: python launch.py -m sweep={names[0]}"
        )
    place = words.index(f"sweep={names[0]}")
    own = [word for word in words if not word.startswith("sweep=")]
    given = {word.lstrip("+~").partition("=")[0] for word in own}
    defined = [item for name in names for item in read_sweep_definition(name, definitions).items()]
    new = [f"{key}={format_sweep_value(value)}" for key, value in defined if key not in given]
    return [*own[:place], *new, *own[place:]]


def add_sweep_folders(words: Sequence[str], typed_words: Sequence[str]) -> list[str]:
    """Add to the words of a sweep the Hydra overrides that set the folders of the sweep and jobs.

    ``typed_words`` is the command as typed. If a key is given twice, its last value is used, as
    in a single run. If no sweep starts, the words are returned as they are. A folder that the words
    already set is kept.

    Raises:
        ConfigError: if no job could run, or a value that names a job's folder contains ``..``.
    """
    if "hydra.launcher.n_jobs=0" in words:
        raise ConfigError(
            "hydra.launcher.n_jobs=0: no job would run; give how many run at a time, or -1 for as "
            "many as there are cores"
        )
    if not is_sweep(words):
        return list(words)
    last = {word.partition("=")[0]: number for number, word in enumerate(words)}
    words = [word for number, word in enumerate(words) if last[word.partition("=")[0]] == number]
    ours = [word for word in words if "=" in word and not word.startswith(("-", "hydra"))]
    overrides = OverridesParser.create().parse_overrides(ours)
    refuse_parent_folders(overrides)
    fixed = [each.key_or_group for each in overrides if not each.is_sweep_override()]
    if len(fixed) == len(overrides):
        return list(words)
    values = dict(word.split("=", 1) for word in typed_words if "=" in word)
    name = next((values[key] for key in NAMED_BY if key in values), "sweep").replace("/", "_")
    own = sha256_of("\n".join(sorted(ours)).encode())[:8]
    folders = [
        f"hydra.sweep.dir={SWEEPS / f'{name}-{own}'}",
        "hydra.sweep.subdir='${rlhf_job_folder:${hydra.job.override_dirname}}'",
        f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]",
    ]
    return _insert_overrides(words, *(f for f in folders if f.partition("=")[0] not in last))


def job_folder_name(text: str) -> str:
    """Return ``text`` as the name of one folder: without /, and cut to MOST_BYTES with a hash."""
    name = text.replace("/", "_")
    if name == text and len(name.encode()) <= MOST_BYTES:
        return name
    own = sha256_of(text.encode())[:8]
    return f"{name.encode()[: MOST_BYTES - 9].decode(errors='ignore')}-{own}"


# Registered on import: joblib's worker processes import this module, and need the resolver too.
OmegaConf.register_new_resolver("rlhf_job_folder", job_folder_name, replace=True)


def refuse_parent_folders(overrides: Sequence[Override]) -> None:
    """Check that no value to try has a path part ``..``, because the values name jobs' folders."""
    for each in overrides:
        if isinstance(each.value(), ChoiceSweep):
            for value in map(str, each.sweep_string_iterator()):
                if ".." in value.split("/"):
                    raise ConfigError(
                        f"{each.key_or_group}={value} in a sweep: values name the folders of the "
                        "jobs, and .. leads out of the sweep's folder; give an absolute path"
                    )


def sweep_folder_of(words: Sequence[str]) -> Path | None:
    """Return the sweep's folder ``hydra.sweep.dir``, or None if the words do not set it."""
    given = (word.partition("=") for word in words)
    folders = (Path(folder) for key, _, folder in given if key == "hydra.sweep.dir")
    return next(folders, None)


@contextmanager
def use_temporary_plan_folder(words: list[str]) -> Iterator[list[str]]:
    """Yield ``words``; for a sweep with plan=only, let Hydra write to a temporary folder."""
    is_set_up = any(word.startswith("hydra") for word in words)
    if not is_sweep(words) or is_set_up or "plan=only" not in words:
        yield words
        return
    with TemporaryDirectory(prefix="rlhf-") as folder:
        yield _insert_overrides(words, f"hydra.sweep.dir={folder}")


def _insert_overrides(words: Sequence[str], *new: str) -> list[str]:
    """Insert overrides after the last override, because flags must not separate overrides."""
    places = [n for n, word in enumerate(words, 1) if "=" in word and not word.startswith("-")]
    end = places[-1] if places else len(words)
    return [*words[:end], *new, *words[end:]]


def read_sweep_definition(name: str, definitions: Path) -> dict[str, Any]:
    """Return the keys and values of ``name``.yaml in the folder ``definitions``.

    Raises:
        ConfigError: if the file is missing, is not a mapping, or holds a secret.
    """
    path = definitions / f"{name}.yaml"
    with translate_errors(lambda reason: ConfigError(f"sweep={name}: cannot be read ({reason})")):
        if not path.is_file():
            known = ", ".join(sorted(each.stem for each in definitions.glob("*.yaml")))
            raise ConfigError(f"sweep={name}: no such file in {definitions}; choose one of {known}")
        read = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(read, dict):
        raise ConfigError(f"{path}: must map keys to a value, or to a list of values to try")
    definition = {str(key): value for key, value in read.items()}
    refuse_secrets_in_command(
        (f"{key}={format_sweep_value(each)}" for key, each in definition.items()), os.environ
    )
    return definition


def format_sweep_value(value: object) -> str:
    """Return a value as command-line text; a list becomes values to try, separated by commas."""
    if isinstance(value, list):
        return ",".join(map(format_sweep_value, value))
    return format_value(value, keeps_unset=True)


def jobs_at_a_time() -> int | None:
    """Return how many jobs of this sweep run at a time, each in its own process.

    Return None if this is no job of a sweep, or if a launcher such as SLURM started this process.
    """
    hydra_config = HydraConfig.get()
    if hydra_config.mode is not RunMode.MULTIRUN:
        return None
    launcher = hydra_config.runtime.choices["hydra/launcher"]
    if launcher == "joblib":
        jobs = int(hydra_config.launcher.n_jobs)
        return (
            jobs if jobs > 0 else max(num_usable_cores() + 1 + jobs, 1)
        )  # -1, the default: every core
    return 1 if launcher == "basic" else None
