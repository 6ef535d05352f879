"""Every table of phases has an entry for each phase, and every list of policies each policy."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from rlhf.chat.run_models import NAMES
from rlhf.config.choices import Phase
from rlhf.evaluate import answer_rows
from rlhf.export import FOLDERS
from rlhf.report import next_commands
from rlhf.report.summary import ARTIFACTS

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("rlhf/**/*.py"))
LEAST = 3  # entries of a table of all phases; smaller tables are about a few phases on purpose

POLICIES = [f"{phase}/{FOLDERS[phase]}" for phase in FOLDERS if phase is not Phase.reward]
LISTS: dict[str, Iterable[str]] = {
    "NAMES in rlhf/chat/run_models.py": [path for paths in NAMES.values() for path in paths],
    "POLICIES in rlhf/evaluate/answer_rows.py": answer_rows.POLICIES.values(),
    "POLICIES in rlhf/report/next_commands.py": next_commands.POLICIES,
    "ARTIFACTS in rlhf/report/summary.py": ARTIFACTS.values(),
}


def phase_of(key: ast.expr | None) -> str | None:
    """The phase that a key of a table names, as ``Phase.sft`` or "sft"."""
    match key:
        case ast.Attribute(value=ast.Name(id="Phase"), attr=name):
            return name
        case ast.Constant(value=str(name)) if name in set(Phase):
            return name
    return None


def incomplete_tables(source: str, path: str) -> list[str]:
    """Tables with phases as keys that lack a phase, with their places."""
    tables = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict)]
    found = []
    for table in tables:
        keys = {phase_of(key) for key in table.keys}
        if None not in keys and len(keys) >= LEAST and (missing := set(Phase) - keys):
            found.append(f"{path}:{table.lineno}: no entry for {', '.join(sorted(missing))}")
    return found


@pytest.mark.parametrize("form", ["Phase.{}: 1", '"{}": 1'])
def test_incomplete_tables_are_found(form: str) -> None:
    entries = [form.format(phase) for phase in Phase]
    source = f"x = {{{', '.join(entries[:-1])}}}"
    assert incomplete_tables(source, "a.py") == [f"a.py:1: no entry for {[*Phase][-1]}"]
    assert incomplete_tables(f"x = {{{', '.join(entries)}}}", "a.py") == []
    assert incomplete_tables(f"x = {{{', '.join(entries[:2])}}}", "a.py") == []
    assert incomplete_tables(f"x = {{{', '.join(entries[:-1])}, other: 1}}", "a.py") == []


def test_every_table_has_every_phase() -> None:
    found = [
        place
        for path in FILES
        for place in incomplete_tables(path.read_text(), path.relative_to(ROOT).as_posix())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("place", LISTS)
def test_every_list_has_every_policy(place: str) -> None:
    missing = set(POLICIES) - set(LISTS[place])
    assert not missing, f"add {', '.join(sorted(missing))} to {place}"
