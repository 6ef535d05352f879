"""parity.yaml: no flag of other programs is left out, its keys exist, its tests exist."""

import ast
import re
import shlex
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import rlhf
from rlhf.config.freeze import to_run_config
from rlhf.config.hydra_errors import schema_types, suggested_keys
from tests.config.test_other_names import is_word
from tests.conftest import Compose

ROOT = Path(__file__).parents[1]


class ParityRow(NamedTuple):
    """One row of a table; ``tests`` are paths below tests/ with the names of test functions."""

    name: str
    what: str
    here: str
    tests: tuple[str, ...]

    @property
    def keys(self) -> list[str]:
        """Everything in backticks, which can be typed on the command line."""
        return re.findall(r"`([^`]+)`", self.here)


def read_row(line: str) -> ParityRow:
    """A row of four cells with something in each."""
    name, what, here, tests = (cell.strip() for cell in line.split(" | "))
    return ParityRow(name, what, here, tuple(tests.split(", ")))


TABLES = {
    table["title"]: [read_row(line) for line in table["rows"].splitlines()]
    for table in yaml.safe_load(Path(__file__).with_name("parity.yaml").read_text("utf-8"))
}
ROWS = [row for rows in TABLES.values() for row in rows]
KEYS = sorted({key for row in ROWS for key in row.keys})
TESTS = sorted({test for row in ROWS for test in row.tests})


def test_every_flaw_has_a_row() -> None:
    names = [row.name for row in TABLES["What differs on purpose"]]
    assert [name for name in names if name.isdigit()] == [str(n) for n in range(1, 18)]


def test_every_row_has_cells_and_a_key_or_says_that_there_is_none() -> None:
    words = ("built in", "no ", "not ")
    free = TABLES["What differs on purpose"]  # a choice may be in no key
    for row in ROWS:
        assert all(cell and cell != ("",) for cell in row), row
        assert row in free or row.keys or row.here.startswith(words), row


@pytest.mark.slow
def test_every_key_exists(compose: Compose) -> None:
    for key in KEYS:
        if key.startswith("rlhf."):
            assert key.removeprefix("rlhf.") in rlhf.__all__
        elif "+" in key:
            to_run_config(compose(shlex.split(key)))
        else:
            assert key in schema_types() or all(map(is_word, shlex.split(key))), key


@cache
def functions_of(path: Path) -> set[str]:
    """Names of the functions in a file, also those of its classes."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


def test_every_named_test_exists() -> None:
    for test in TESTS:
        path, _, function = test.partition("::")
        assert function.startswith("test_")
        assert function in functions_of(ROOT / "tests" / path), test


def test_every_flag_is_translated_by_its_error() -> None:
    """The error for a flag names a key, unless its row says that there is none."""
    tables = [rows for title, rows in TABLES.items() if title.startswith("DeepSpeed-Chat, ")]
    assert len(tables) == 6
    for row in chain.from_iterable(tables):
        flag = row.name.removeprefix("--").replace("-", "_")
        known = flag in schema_types() or suggested_keys(flag, schema_types())
        assert known or "built in" in row.here, row.name
