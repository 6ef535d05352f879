"""Count the functions that the configuration visits on its way from launch.py to the phases.

python -m tools.config_walk    print the numbers, and each function under the one that calls it

The walk starts where Hydra hands over the composed configuration, and again where a rank reads the
frozen one. It follows each call that passes a whole configuration: ``cfg`` or ``config``, the
``job`` that carries it before it is checked, or the parameter by which it came. Parts of it, such
as ``config.ppo``, are other objects. A function that is called at two places has two visits.
"""

from __future__ import annotations

import ast
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NAMES = frozenset({"cfg", "config", "job"})
STARTS = ("launch.main", "rlhf.runtime.worker.run_worker")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Function(NamedTuple):
    """A function of the package, and what the names that it uses stand for."""

    node: FunctionNode
    owner: str
    """The class of a method, or the module of a function."""
    meanings: dict[str, str]
    """Names of its module -> dotted names."""

    @property
    def parameters(self) -> list[str]:
        """Return the names of the parameters that a call passes by position."""
        named = [each.arg for each in (*self.node.args.posonlyargs, *self.node.args.args)]
        return named[1:] if named[:1] in (["self"], ["cls"]) else named


def read_functions(sources: dict[str, str]) -> dict[str, Function]:
    """Return the functions and methods in ``sources``, a text for each module, by dotted name."""
    found = {}
    for module, source in sources.items():
        tree = ast.parse(source)
        meanings = dict(_meanings(tree, module))
        for node in tree.body:
            members = node.body if isinstance(node, ast.ClassDef) else [node]
            owner = f"{module}.{node.name}" if isinstance(node, ast.ClassDef) else module
            for member in members:
                if isinstance(member, FunctionNode):
                    found[f"{owner}.{member.name}"] = Function(member, owner, meanings)
    return found


def _meanings(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Yield the names that a module defines or imports, at any depth, and their dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names)
    for node in tree.body:
        if isinstance(node, FunctionNode | ast.ClassDef):
            yield node.name, f"{module}.{node.name}"


def visited(functions: dict[str, Function], starts: Sequence[str]) -> dict[str, str]:
    """Return the functions that the configuration visits, each with the caller that passed it."""
    callers = dict.fromkeys(starts, "")
    names = dict.fromkeys(starts, NAMES)
    pending = deque(starts)
    while pending:
        caller = pending.popleft()
        for callee, parameters in _passes(functions, functions[caller], names[caller]):
            known = names.get(callee, NAMES)
            if callee not in callers or not parameters <= known:
                callers.setdefault(callee, caller)
                names[callee] = known | parameters
                pending.append(callee)
    return callers


def num_visits(functions: dict[str, Function], starts: Sequence[str]) -> int:
    """Return how often the configuration enters a function if every call is made once."""

    @cache
    def below(name: str, names: frozenset[str]) -> int:
        passes = _passes(functions, functions[name], names)
        return 1 + sum(below(callee, NAMES | by) for callee, by in passes if callee != name)

    return sum(below(start, NAMES) for start in starts)


def _passes(
    functions: dict[str, Function], caller: Function, names: frozenset[str]
) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the functions that ``caller`` passes one of ``names`` to, and their parameters."""
    for node in ast.walk(caller.node):
        if not isinstance(node, ast.Call):
            continue
        callee = _called(functions, caller, node.func)
        if callee is None:
            continue
        by_position = zip(functions[callee].parameters, node.args, strict=False)
        by_name = ((each.arg, each.value) for each in node.keywords if each.arg is not None)
        given = (
            parameter
            for parameter, value in (*by_position, *by_name)
            if isinstance(value, ast.Name) and value.id in names
        )
        if parameters := frozenset(given):
            yield callee, parameters


def _called(functions: dict[str, Function], caller: Function, func: ast.expr) -> str | None:
    """Return the dotted name of the function that is called; None if it is not the package's."""
    match func:
        case ast.Name(id=name):
            meant = caller.meanings.get(name, name)
            places = [meant, f"{meant}.__init__"]
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
            places = [f"{caller.owner}.{name}"]
        case ast.Attribute(value=ast.Name(id=of), attr=name) if of in caller.meanings:
            meant = f"{caller.meanings[of]}.{name}"
            places = [meant, f"{meant}.__init__"]
        case ast.Attribute(attr=name):  # an object of a class that the module has a name for
            near = {meant.rpartition(".")[0] for meant in caller.meanings.values()}
            methods = [
                key
                for key, each in functions.items()
                if key == f"{each.owner}.{name}" and each.owner.rpartition(".")[0] in near
            ]
            places = methods if len(methods) == 1 else []
        case _:
            places = []
    return next((place for place in places if place in functions), None)


def read_sources() -> dict[str, str]:
    """Return the text of launch.py and of each module of the package."""
    paths = [ROOT / "launch.py", *sorted((ROOT / "rlhf").rglob("*.py"))]
    dotted = (path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in paths)
    return dict(zip(dotted, (path.read_text() for path in paths), strict=True))


def main() -> None:
    """Print how many functions the configuration visits, and which passes it to which."""
    functions = read_functions(read_sources())
    callers = visited(functions, STARTS)
    lines = [f"{len(callers)} functions, {num_visits(functions, STARTS)} visits"]
    pending = [(start, 0) for start in reversed(STARTS)]
    while pending:
        name, depth = pending.pop()
        lines.append("  " * depth + name)
        pending += [(each, depth + 1) for each, by in reversed(callers.items()) if by == name]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
