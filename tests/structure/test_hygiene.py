"""Habits that this project does without, but for those that ruff finds."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.structure.parsed import nodes_of

ROOT = Path(__file__).parents[2]
FILES = [*sorted(ROOT.glob("rlhf/**/*.py")), ROOT / "launch.py"]
CONF = [*sorted(ROOT.glob("conf/**/*.yaml")), *sorted(ROOT.glob("sweeps/**/*.yaml"))]

UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def check_unpickling(source: str, path: str) -> list[str]:
    """Ways to run code that hides in a file: pickle, its kin, and torch.load."""
    used = []
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            used += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            used += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute):
            used += [(node.lineno, ast.unparse(node))]
    return [
        f"{path}:{line}: {name} can run code from a file; use safetensors or JSON"
        for line, name in used
        if name == "torch.load" or name.split(".")[0] in UNSAFE_MODULES
    ]


def check_unfinished(source: str, path: str) -> list[str]:
    """Notes of work left to do."""
    return matching_lines(r"\b(TODO|FIXME|XXX)\b", source, path)


def check_remote_code(source: str, path: str) -> list[str]:
    """Running a model's own code is the user's decision, never ours."""
    return matching_lines(r"trust_remote_code\W{1,3}(true|1|yes|on)\b", source, path)


def check_ending_by_name(source: str, path: str) -> list[str]:
    """A program ends only the processes that it started."""
    return matching_lines(r"\b(pkill|killall)\b", source, path)


def matching_lines(pattern: str, source: str, path: str) -> list[str]:
    """Lines that match ``pattern``, in any case."""
    return [
        f"{path}:{number}: {line.strip()}"
        for number, line in enumerate(source.splitlines(), start=1)
        if re.search(pattern, line, flags=re.IGNORECASE)
    ]


def broken_lines(check: Callable[[str, str], list[str]], files: list[Path]) -> str:
    """What ``check`` finds in ``files``, one line each."""
    sources = ((path.read_text(), path.relative_to(ROOT).as_posix()) for path in files)
    return "".join(f"\n{line}" for source, path in sources for line in check(source, path))


def test_source_does_without() -> None:
    broken = broken_lines(check_unpickling, FILES)
    assert not broken, broken


@pytest.mark.parametrize("check", [check_unfinished, check_remote_code, check_ending_by_name])
def test_config_does_without(check: Callable[[str, str], list[str]]) -> None:
    broken = broken_lines(check, [*FILES, *CONF])
    assert not broken, broken
