"""No room grows unnoticed: lines of Python per room, words of the docs, files in a circle."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.base.packaged_yaml import read_yaml_beside
from tests.structure.parsed import parsed
from tests.structure.test_imports import module_of
from tests.structure.test_layers import imported_modules

ROOT = Path(__file__).parents[2]
BUDGETS = read_yaml_beside(__file__, "budgets.yaml")
SLACK = 60  # lines by which a ceiling may be too high


def lines_in(*places: Path) -> int:
    """Lines of the Python files at, or below, these places."""
    files = {
        file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])
    }
    return sum(len(file.read_text().splitlines()) for file in files)


@pytest.mark.parametrize("room", BUDGETS["rooms"])
def test_a_room_stays_below_its_ceiling(room: str) -> None:
    found = lines_in(*(ROOT / "rlhf" / name for name in room.split(", ")))
    ceiling = BUDGETS["rooms"][room]["ceiling"]
    assert found <= ceiling, "make it smaller, or lower another ceiling by as much"
    assert found > ceiling - SLACK, f"lower the ceiling to {found}"


@pytest.mark.parametrize("whole", BUDGETS["wholes"])
def test_a_whole_stays_below_its_ceiling(whole: str) -> None:
    found, ceiling = lines_in(ROOT / whole), BUDGETS["wholes"][whole]["ceiling"]
    assert found <= ceiling
    assert found > ceiling - 5 * SLACK, f"lower the ceiling to {found}"


def test_every_room_has_a_budget() -> None:
    named = {name for room in BUDGETS["rooms"] for name in room.split(", ")}
    rooms = {path.name for path in (ROOT / "rlhf").iterdir() if path.name[0] != "_"}
    assert rooms - {"py.typed"} == named


def test_the_docs_stay_short() -> None:
    """Words outside of code, in the pages that a user or contributor reads."""
    names = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")
    pages = [*(ROOT / name for name in names), *ROOT.glob("docs/*.md")]
    texts = (re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S) for page in pages)
    assert sum(len(text.split()) for text in texts) <= BUDGETS["docs_words"]


def static_imports(node: ast.AST) -> Iterator[ast.AST]:
    """Imports at the top of a file, those for type checkers included, but not in functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from static_imports(child)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that reach one another."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        pending, seen = [start], set[str]()
        while pending:
            for name in graph[pending.pop()] - seen:
                seen.add(name)
                pending.append(name)
        reached[start] = seen
    return [{b for b in reached[a] if a in reached[b]} for a in graph]


def test_no_large_circle_of_imports_even_for_type_checkers() -> None:
    files = [p for place in ("rlhf", "lab/rlhf_lab") for p in (ROOT / place).rglob("*.py")]
    paths = {path.relative_to(ROOT).as_posix(): path for path in files}
    modules = {path: module_of(path.removeprefix("lab/")) for path in paths}
    graph = {}
    for path, file in paths.items():
        imports = imported_modules(static_imports(parsed(file.read_text())), path)
        names = {name for _, name in imports}
        found = {name if name in modules.values() else name.rpartition(".")[0] for name in names}
        graph[modules[path]] = (found & {*modules.values()}) - {modules[path]}
    largest = max(circles(graph), key=len)
    assert len(largest) <= BUDGETS["most_files_in_a_circle"], sorted(largest)
