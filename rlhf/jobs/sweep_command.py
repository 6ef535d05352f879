"""Read the commands of sweeps: ``python launch.py -m KEY=A,B`` and ``-m sweep=NAME``.

The name of a sweep's folder is derived from its command. The folder of each job is named by the
values that differ between jobs. The same command again therefore continues the sweep.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from rlhf.base.cpu import num_usable_cores
from rlhf.base.errors import ConfigError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.hashing import sha256_of
from rlhf.config.hydra_parts import ChoiceSweep, Override, parse_overrides, values_of
from rlhf.config.run_dir import SWEEPS
from rlhf.config.schema.keys import format_value
from rlhf.config.validation import refuse_secrets_in_command

MULTIRUN = frozenset({"-m", "--multirun"})
MOST_NAME_BYTES = 200  # of a job's folder name; file systems allow 255 bytes
FILE_WORDS = ("grid", "zip")  # in files of sweeps: all combinations, and paired values
# Words of sweeps, and the keys that they set.
SWEEP_WORDS = {
    "seeds": "seed",
    "minutes": "hydra.sweeper.minutes",
    "dollars": "hydra.sweeper.dollars",
}
NAMED_BY = ("sweep", "experiment")  # keys whose value begins the name of a sweep's folder


def is_sweep(words: Sequence[str]) -> bool:
    """Return True if the command starts a sweep."""
    return not MULTIRUN.isdisjoint(words)


def expand_sweep(
    words: Sequence[str], definitions: Path, own: Sequence[Path] = ()
) -> tuple[list[str], set[str]]:
    """Replace ``sweep=NAME``, seeds, minutes and dollars by the overrides that they stand for.

    NAME.yaml does not change a key that the command sets. Return the new words, and the keys that
    may get more values when the sweep continues: seed (with ``seeds``), and keys in grid and zip.

    Raises:
        ConfigError: if NAME.yaml or a value is wrong, or the command lacks -m.
    """
    aliases = [word for word in words if word.partition("=")[0] in {"sweep", *SWEEP_WORDS}]
    if aliases and not is_sweep(words):
        raise ConfigError(f"{aliases[0]} is for several runs: python launch.py -m {aliases[0]}")
    translated, new, groups, growing = list[str](), list[str](), list[str](), set[str]()
    for word in words:
        key, _, value = word.partition("=")
        translated.append("{}={}".format(*_translate(key, value)) if key in SWEEP_WORDS else word)
    given = {word.lstrip("+~").partition("=")[0] for word in translated}
    for name in (word.removeprefix("sweep=") for word in aliases if word.startswith("sweep=")):
        definition, many, paired = read_sweep_file(name, definitions, own)
        new += [f"{k}={format_sweep_value(v)}" for k, v in definition.items() if k not in given]
        growing |= many - given
        if paired := [key for key in paired if key not in given]:
            groups.append(f"[{','.join(paired)}]")
    if groups:
        new.append(f"hydra.sweeper.paired=[{','.join(groups)}]")
    if any(word.startswith("seeds=") for word in aliases):
        growing.add("seed")
    position = next((n for n, word in enumerate(translated) if word.startswith("sweep=")), 0)
    rest = [word for word in translated[position:] if not word.startswith("sweep=")]
    return [*translated[:position], *new, *rest], growing


def read_sweep_file(
    name: str, definitions: Path, own: Sequence[Path] = ()
) -> tuple[dict[str, Any], set[str], list[str]]:
    """Return a sweep file's keys and values, its keys that may get more values, its paired keys."""
    definition = read_sweep_definition(name, definitions, own)
    grid, paired = parts = [definition.pop(part, {}) for part in FILE_WORDS]
    for part, lists in zip(FILE_WORDS, parts, strict=True):
        if not isinstance(lists, dict) or not all(isinstance(v, list) for v in lists.values()):
            raise ConfigError(f"sweep={name}, {part}={lists}: must map keys to lists of values")
    if len({len(values) for values in paired.values()}) > 1:
        sizes = ", ".join(f"{key} has {len(values)}" for key, values in paired.items())
        raise ConfigError(
            f"sweep={name}, zip: {sizes} values; values are paired by position, so make the lists "
            "equally long, or use grid for all combinations"
        )
    growing = {*grid, *paired, *(["seed"] if "seeds" in definition else [])}
    items = [*(_translate(*item) for item in definition.items()), *grid.items(), *paired.items()]
    if twice := [key for n, (key, _) in enumerate(items) if key in dict(items[:n])]:
        raise ConfigError(f"sweep={name}: the file gives {twice[0]} twice; keep one")
    return dict(items), growing, list(paired)


def _translate(key: str, value: Any) -> tuple[str, Any]:
    """Return key and value, with seeds, minutes and dollars replaced by what they stand for."""
    if key not in SWEEP_WORDS:
        return key, value
    number = 0.0
    with suppress(ValueError):
        number = (int if key == "seeds" else float)(str(value))
    if not 0 < number < inf:
        raise ConfigError(f"{key}={value}: must be a number above 0 (seeds: a whole number)")
    return SWEEP_WORDS[key], f"range(1,{number + 1})" if key == "seeds" else number


def add_sweep_folders(
    words: Sequence[str], typed_words: Sequence[str], growing: Collection[str] = ()
) -> list[str]:
    """Add overrides of Hydra to the words of a sweep: its sweeper, and the folders of its jobs.

    ``typed_words`` is the command as typed. If a key is given twice, its last value is used, as
    in a single run. If no sweep starts, the words are returned as they are. A folder that the words
    already set is kept. The sweep's folder does not depend on the values of keys in ``growing``.

    Raises:
        ConfigError: if no job could run, or a value that names a job's folder contains ``..``.
    """
    if "hydra.launcher.n_jobs=0" in words:
        raise ConfigError(
            "hydra.launcher.n_jobs=0: no job would run; set how many run at a time, or -1 for one "
            "per core"
        )
    if not is_sweep(words):
        return list(words)
    if "hydra/launcher=slurm" in words and any(w.startswith("launcher.dry_run=") for w in words):
        raise ConfigError(
            "launcher.dry_run with hydra/launcher=submitit_slurm: SLURM would start a job to print "
            "a command; remove -m and hydra/launcher to see the command of a node here"
        )
    last = {word.partition("=")[0]: number for number, word in enumerate(words)}
    words = [word for number, word in enumerate(words) if last[word.partition("=")[0]] == number]
    settings = [word for word in words if "=" in word and not word.startswith(("-", "hydra"))]
    overrides = parse_overrides(settings)
    refuse_parent_folders(overrides)
    single = [each.key_or_group for each in overrides if not each.is_sweep_override()]
    fixed = [key for key in single if key not in growing]
    new = ["hydra/sweeper=jobs"]
    if len(fixed) < len(overrides):
        values = dict(word.split("=", 1) for word in typed_words if "=" in word)
        name = next((values[key] for key in NAMED_BY if key in values), "sweep").replace("/", "_")
        paired = [word for word in words if word.startswith("hydra.sweeper.paired=")]
        named = [
            next((f"{k}=" for k in growing if word.startswith(f"{k}=")), word) for word in settings
        ]
        digest = sha256_of("\n".join(sorted([*named, *paired])).encode())[:8]
        new += [
            f"hydra.sweep.dir={SWEEPS / f'{name}-{digest}'}",
            "hydra.sweep.subdir='${rlhf_job_folder:${hydra.job.override_dirname}}'",
            f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]",
        ]
    return _insert_overrides(words, *(each for each in new if each.partition("=")[0] not in last))


def job_folder_name(text: str) -> str:
    """Return ``text`` as a folder name without /, shortened if too long; a hash marks changes."""
    name = text.replace("/", "_")
    if name == text and len(name.encode()) <= MOST_NAME_BYTES:
        return name
    digest = sha256_of(text.encode())[:8]
    return f"{name.encode()[: MOST_NAME_BYTES - 9].decode(errors='ignore')}-{digest}"


# Registered on import: joblib's worker processes import this module, and need the resolver too.
OmegaConf.register_new_resolver("rlhf_job_folder", job_folder_name, replace=True)


def refuse_parent_folders(overrides: Sequence[Override]) -> None:
    """Check that no value to try has a path part ``..``, because the values name jobs' folders."""
    for each in overrides:
        if isinstance(each.value(), ChoiceSweep):
            for value in values_of(each):
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
    if not is_sweep(words) or sweep_folder_of(words) or "plan=only" not in words:
        yield words
        return
    with TemporaryDirectory(prefix="rlhf-") as folder:
        yield _insert_overrides(words, f"hydra.sweep.dir={folder}")


def _insert_overrides(words: Sequence[str], *new: str) -> list[str]:
    """Insert overrides after the last override, because flags must not separate overrides."""
    places = [n for n, word in enumerate(words, 1) if "=" in word and not word.startswith("-")]
    end = places[-1] if places else len(words)
    return [*words[:end], *new, *words[end:]]


def read_sweep_definition(name: str, definitions: Path, own: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the keys and values of ``name``.yaml in the folder ``definitions``.

    It may also be in the folder sweeps/ of one of ``own``, which are like conf/.

    Raises:
        ConfigError: if the file is missing, is not a mapping, or holds a secret.
    """
    folders = [definitions, *(folder / "sweeps" for folder in own)]
    with translate_errors(lambda reason: ConfigError(f"sweep={name}: cannot be read ({reason})")):
        path = next((p for folder in folders if (p := folder / f"{name}.yaml").is_file()), None)
        if path is None:
            known = ", ".join(sorted(p.stem for folder in folders for p in folder.glob("*.yaml")))
            places = " or ".join(map(str, folders))
            raise ConfigError(f"sweep={name}: no such file in {places}; choose one of {known}")
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
        # -1, the default: every core
        return jobs if jobs > 0 else max(num_usable_cores() + 1 + jobs, 1)
    return 1 if launcher == "basic" else None
