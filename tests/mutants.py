"""Plant one-line faults at random places of the source; name those that no test finds.

    python -m tests.mutants [--faults 150] [--seed 1] [--within rlhf/data]

A fault turns a comparison, an operator, a condition or a number into another one. The tests of a
fault are those that name its module, or that stand in the file or folder that mirrors it.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.planted import RED, copy_source
from tests.runs import ROOT

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.MatMult: ast.Mult},
}
SECONDS = 400  # quick tests take less: a fault with which they do not end is found


class Fault(NamedTuple):
    """A line of a file, and the line that replaces it."""

    path: Path
    line: int  # from 1
    old: str
    new: str


def faults_of(path: Path) -> Iterator[Fault]:
    """Yield the faults that ``path`` can have: one for each operator, condition or number."""
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(node, ast.expr) or node.lineno != node.end_lineno:
            continue
        old = lines[node.lineno - 1]
        before, text, after = (
            old.encode()[part].decode()
            for part in (
                slice(node.col_offset),
                slice(node.col_offset, node.end_col_offset),
                slice(node.end_col_offset, None),
            )
        )
        if (other := _mutate(node)) is not None and other != text:
            yield Fault(path, node.lineno, old, f"{before}({other}){after}")


def _mutate(node: ast.expr) -> str | None:
    """Return the source of ``node`` with another meaning; None if it has none of the kinds."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
            node.ops = [SWAPS[type(operator)]()]  # type: ignore[list-item]
        case ast.BinOp() | ast.BoolOp() if type(node.op) in SWAPS:
            if any(isinstance(each, ast.Constant | ast.JoinedStr) for each in ast.walk(node)):
                return None  # most often a text, or a unit that _mutate changes by itself
            node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not()):
            return ast.unparse(node.operand)
        case ast.Constant(value=bool()):
            return str(not node.value)
        case ast.Constant(value=int() | float() as number):
            return repr(number + 1)
        case _:
            return None
    return ast.unparse(node)


def tests_of(path: Path) -> list[str]:
    """Return the tests that mirror ``path``, or name its module, as paths from the root."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    named = [each for each in ROOT.glob("tests/**/test_*.py") if module in each.read_text()]
    mirrored = ROOT / "tests" / path.relative_to(ROOT / "rlhf").parent
    rooms = [mirrored, *mirrored.parents][: len(path.relative_to(ROOT).parts) - 2]
    beside = next(filter(None, ([*room.glob("test_*.py")] for room in rooms)), [])
    return sorted({str(each.relative_to(ROOT)) for each in [*named, *beside]})


def is_found(fault: Fault, tree: Path) -> bool:
    """Return True if a test is red, or quick tests do not end, with the fault in ``tree``."""
    path = tree / fault.path.relative_to(ROOT)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[: fault.line - 1], fault.new + "\n", *lines[fault.line :]]))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m"]
    try:
        for marked in ("not slow and not soak", "slow"):
            run = subprocess.run(
                [*command, marked, *tests_of(fault.path)],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},
                capture_output=True,
                timeout=SECONDS,
                check=False,
            )
            if run.returncode in (RED, 2, 3, 4):  # or the tests cannot even be collected
                return True
    except subprocess.TimeoutExpired:
        return marked != "slow"
    finally:
        path.write_text("".join(lines))
    return False


def main() -> None:
    """Plant the faults in turn; print each that no test finds, and how many were found."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--faults", type=int, default=150)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--within", default="rlhf", help="a folder or file of the package")
    given = options.parse_args()
    within = ROOT / given.within
    files = [path for path in sorted(ROOT.glob("rlhf/**/*.py")) if path.is_relative_to(within)]
    files = [path for path in files if tests_of(path)]
    chosen: list[Fault] = []
    draw = random.Random(given.seed)
    while len(chosen) < given.faults:  # a file first, so that each room has its share
        if faults := list(faults_of(draw.choice(files))):
            chosen.append(draw.choice(faults))
    with tempfile.TemporaryDirectory() as folder:
        tree, found = copy_source(Path(folder)), 0
        for number, fault in enumerate(chosen, start=1):
            is_red = is_found(fault, tree)
            found += is_red
            if not is_red:
                where = f"{fault.path.relative_to(ROOT)}:{fault.line}"
                print(f"survived: {where}: {fault.old.strip()} -> {fault.new.strip()}", flush=True)
            print(f"{found} of {number} found", flush=True)


if __name__ == "__main__":
    main()
