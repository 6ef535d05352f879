"""Seal a judge, a user's reward function: it runs from a private copy of its code and files.

The seal is one hash of the judge's module and of its ``files`` when the run begins, stored in the
frozen configuration. Every process of the judge compares it with the hash of its own copy.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf.base.errors import ConfigError, RewardError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.hashing import sha256_of
from rlhf.base.isolated_process import find_code_file
from rlhf.config.schema.rewards import AUTO, RewardTerm

PR_SET_DUMPABLE = 4  # from <linux/prctl.h>


def seal_judges(parts: Mapping[str, RewardTerm]) -> dict[str, RewardTerm]:
    """Return the parts of the score, with the seal of each judge in place of sealed=auto."""
    return {
        name: replace(part, sealed=compute_seal(name, part)) if part.sealed == AUTO else part
        for name, part in parts.items()
    }


def require_sealed_judges(parts: Mapping[str, RewardTerm]) -> None:
    """Raise RewardError if the code or the files of a sealed judge are not those of its seal."""
    for name, part in parts.items():
        if part.sealed and compute_seal(name, part) != part.sealed:
            raise RewardError(
                f"rewards.{name}.sealed={part.sealed}: the judge's code or files have changed "
                "since the run began; restore them, and resume the run"
            )


def compute_seal(name: str, part: RewardTerm) -> str:
    """Return the seal of the judge ``name``; raise ConfigError if one of its files is missing."""

    def build_error(reason: str) -> ConfigError:
        return ConfigError(
            f"rewards.{name}.sealed: the judge cannot be read ({reason}); rewards.{name}.files are "
            "paths below the folder of its module"
        )

    with translate_errors(build_error):
        return _hash_all(*find_judge_files(part))


def find_judge_files(part: RewardTerm) -> tuple[Path, list[str]]:
    """Return the folder of a judge's module, and the paths in it of its code and its files."""
    code = find_code_file(str(part.function))
    root = code.parents[str(part.function).count(".")]
    named = (root / file for file in part.files)
    paths = [code, *(p for each in named for p in (each.rglob("*") if each.is_dir() else [each]))]
    files = {p.relative_to(root) for p in paths if not p.is_dir() and "__pycache__" not in p.parts}
    return root, sorted(path.as_posix() for path in files)


def _hash_all(root: Path, names: list[str]) -> str:
    return sha256_of(f"{name} {sha256_of((root / name).read_bytes())}\n".encode() for name in names)


@contextmanager
def sealed_copy(part: RewardTerm) -> Iterator[None]:
    """Make a private copy of a judge from which this process imports it; then remove the copy.

    Afterwards this copy is only in the memory of this process, which no other process of the same
    user can read: the system refuses to show the memory of a process that is not dumpable.

    Raises:
        ConfigError: if the copy does not have the seal.
    """
    root, names = find_judge_files(part)
    with TemporaryDirectory(prefix="rlhf-judge-") as folder:  # readable by this user only
        for name in names:
            copy = Path(folder, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, copy)
            copy.chmod(0o400)
        if (seal := _hash_all(Path(folder), names)) != part.sealed:
            raise ConfigError(
                f"sealed={part.sealed}: the judge's code or files have changed: their seal is "
                f"{seal}; restore them, or begin another run"
            )
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
        sys.path.insert(0, folder)
        os.chdir(folder)
        yield
        os.chdir("/")
