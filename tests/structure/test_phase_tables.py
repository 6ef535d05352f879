"""Every table of phases has an entry for each phase, and every list of policies each policy."""

import ast
from pathlib import Path

from rlhf.config.choices import Phase
from rlhf.export import FOLDERS
from rlhf.run.policies import TRAINED

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("rlhf/**/*.py"))
LEAST = 3  # entries of a table of all phases; smaller tables are about a few phases on purpose


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


def test_every_table_has_every_phase() -> None:
    found = [
        place
        for path in FILES
        for place in incomplete_tables(path.read_text(), path.relative_to(ROOT).as_posix())
    ]
    assert not found, "\n".join(found)


def test_every_phase_that_trains_a_policy_is_listed() -> None:
    folders = {f"{phase}/{FOLDERS[phase]}" for phase in FOLDERS if phase is not Phase.reward}
    assert folders == {policy.folder for policy in TRAINED}
