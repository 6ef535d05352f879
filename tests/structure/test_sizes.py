"""Caps on the size of files, classes, functions and argument lists: long tails are hard to read."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [*sorted(ROOT.glob("rlhf/**/*.py")), ROOT / "launch.py"]

# A cap is a question, not a rule: what is read together stands together.
FILE_LINES = 340
CLASS_LINES = 200
FUNCTION_LINES = 50
PHASE_FUNCTION_LINES = 80  # a phase's loop reads like the paper, in one piece
ARGUMENTS = 8  # a loss of PPO: four tensors, and what the configuration says of them

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def num_lines(node: ast.ClassDef | FunctionNode) -> int:
    """Lines from ``class`` or ``def`` to the last one, docstring included."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def num_arguments(function: FunctionNode) -> int:
    """Arguments of every kind; self and cls do not count."""
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return sum(a is not None and a.arg not in {"self", "cls"} for a in named)


def functions(source: str) -> Iterator[FunctionNode]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, FunctionNode))


def check_file(source: str, path: str) -> list[str]:
    """Files that are too long."""
    lines = len(source.splitlines())
    return [f"{path}: {lines} lines > {FILE_LINES}"] if lines > FILE_LINES else []


def check_classes(source: str, path: str) -> list[str]:
    """Classes that are too long."""
    return [
        f"{path}:{node.lineno}: class {node.name} has {num_lines(node)} lines > {CLASS_LINES}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and num_lines(node) > CLASS_LINES
    ]


def check_functions(source: str, path: str) -> list[str]:
    """Functions that are too long."""
    cap = PHASE_FUNCTION_LINES if path.startswith("rlhf/phases/") else FUNCTION_LINES
    return [
        f"{path}:{node.lineno}: {node.name} has {num_lines(node)} lines > {cap}"
        for node in functions(source)
        if num_lines(node) > cap
    ]


def check_arguments(source: str, path: str) -> list[str]:
    """Functions that take too many arguments."""
    return [
        f"{path}:{node.lineno}: {node.name} has {num_arguments(node)} arguments > {ARGUMENTS}"
        for node in functions(source)
        if num_arguments(node) > ARGUMENTS
    ]


Check = Callable[[str, str], list[str]]


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_file, check_classes, check_functions, check_arguments])
def test_source_keeps_within_the_cap(check: Check) -> None:
    sources = ((path.read_text(), path.relative_to(ROOT).as_posix()) for path in FILES)
    broken = [line for source, path in sources for line in check(source, path)]
    assert not broken, "\n" + "\n".join(broken)


def class_of(lines: int) -> str:
    """Source of a class with so many lines."""
    return "class A:\n" + "    x = 1\n" * (lines - 1)


def function_of(lines: int) -> str:
    """Source of a method with so many lines."""
    return "class A:\n    async def f(self):\n" + "        x = 1\n" * (lines - 1)


def arguments_of(count: int) -> str:
    """Source of a method with so many arguments, one of each kind among them."""
    plain = ", ".join(f"a{i}" for i in range(count - 4))
    return f"class A:\n    def f(self, p, /, {plain}, *args, k, **rest): ..."


@pytest.mark.parametrize(
    ("check", "path", "make", "cap"),
    [
        (check_file, "rlhf/a.py", lambda lines: "x = 1\n" * lines, FILE_LINES),
        (check_classes, "rlhf/a.py", class_of, 200),
        (check_functions, "rlhf/a.py", function_of, 50),
        (check_functions, "rlhf/phases/ppo/loop.py", function_of, 80),
        (check_arguments, "rlhf/a.py", arguments_of, ARGUMENTS),
    ],
)
def test_cap_is_where_it_says(
    check: Check, path: str, make: Callable[[int], str], cap: int
) -> None:
    assert not check(make(cap), path)
    assert len(check(make(cap + 1), path)) == 1
