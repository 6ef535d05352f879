"""Plant one-line faults at random places of the source, and name the test that finds each.

    python -m tests.mutants [--faults 150] [--seed 1] [--within rlhf/data] [--part 1/2]

A fault turns a comparison, an operator, a condition or a number into another one. The tests of a
fault are those that name its module, that stand in the file or folder that mirrors it, those of bad
commands if it is a rule, and those of models' weights if it is a cost.
"""

import argparse
import ast
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from ctypes import CDLL
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.pretend_cuda.gpu import load, missing_to_pretend
from tests.runs import ROOT

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.MatMult: ast.Mult},
}
COPIED = ("rlhf", "lab", "conf", "sweeps", "tests", "tools", "docs", "examples", "benchmarks")
IMPORTED_WITH = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}  # as conftest.py sets them
IMPORTED = ("torch", "transformers", "deepspeed", "datasets")  # before the tests are forked
ALREADY_IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"  # plugins of pytest
OUTPUT = "pytest.txt"  # in the tree: what pytest said last
REFUSALS = "tests/config/test_commands.py"
COUNTED = "tests/models/test_model_uses.py"
RED = 1  # pytest's exit code if tests failed; others mean that it could not run them
CANNOT_COLLECT = (2, 3, 4)  # pytest's exit codes if a test file or conftest.py cannot be imported
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
        if old.startswith("@dataclass"):  # names or positions: a caller has either
            continue
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


def tests_of(path: Path, tree: Path) -> list[str]:
    """Return the tests in ``tree`` that name the module ``path``, then those that mirror it."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    named = [each for each in tree.glob("tests/**/test_*.py") if module in each.read_text()]
    mirrored = tree / "tests" / path.relative_to(ROOT / "rlhf").parent
    rooms = [mirrored, *mirrored.parents][: len(path.relative_to(ROOT).parts) - 2]
    beside = next(filter(None, ([*room.glob("test_*.py")] for room in rooms)), [])
    is_rule = path.parent.name == "schema" or path.name == "rules.py"
    users = [*([REFUSALS] if is_rule else []), *([COUNTED] if path.name == "costs.py" else [])]
    own = [str(each.relative_to(tree)) for each in [*sorted(named), *sorted(beside)]]
    return list(dict.fromkeys([*users, *own]))


def copy_source(tree: Path) -> Path:
    """Copy the source to ``tree`` without bytecode; return ``tree``."""
    for name in COPIED:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    return tree


def is_found(fault: Fault, tree: Path) -> bool:
    """Return True if a test is red, or quick tests do not end, with the fault in ``tree``."""
    path = tree / fault.path.relative_to(ROOT)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[: fault.line - 1], fault.new + "\n", *lines[fault.line :]]))
    try:
        for marked in ("not slow and not soak", "slow"):
            code = run_tests(tests_of(fault.path, tree), marked, tree)
            if code in (RED, *CANNOT_COLLECT):
                return True
            if code is None:
                return marked != "slow"
    finally:
        path.write_text("".join(lines))
    return False


def run_tests(tests: list[str], marked: str, tree: Path) -> int | None:
    """Run the tests of ``tree`` in a fork, which has its imports done; None: they do not end."""
    library = load() if missing_to_pretend() is None else None
    for name in IMPORTED:
        import_module(name)
    given = (tests, marked, tree, library)
    process = get_context("fork").Process(target=_run_in_fork, args=given)
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        os.killpg(process.ident or 0, signal.SIGKILL)
        process.join()
        return None
    return process.exitcode


def _run_in_fork(tests: list[str], marked: str, tree: Path, library: CDLL | None) -> None:
    """Run the tests of ``tree``, and end this process with pytest's exit code."""
    os.setsid()  # what the tests start ends with them
    os.chdir(tree)
    places, others = [str(tree), str(tree / "lab")], ("", str(ROOT), str(ROOT / "lab"))
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    sys.path[:] = [*places, *(place for place in sys.path if place not in others)]
    own = ("rlhf", "rlhf_lab", "tests")
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]
    import_module("tests.pretend_cuda.gpu").load = lambda: library  # it is, and torch has found it
    with (tree / OUTPUT).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-W", ALREADY_IMPORTED, "-m", marked]
    os._exit(pytest.main([*options, *tests]))


def main() -> None:
    """Plant the faults in turn; print each with the test that finds it, and how many were found."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--faults", type=int, default=150)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--within", default="rlhf", help="a folder or file of the package")
    options.add_argument("--part", default="1/1", help="k/n: every n-th fault, from the k-th")
    given = options.parse_args()
    part, parts = map(int, given.part.split("/"))
    within = ROOT / given.within
    files = [path for path in sorted(ROOT.glob("rlhf/**/*.py")) if path.is_relative_to(within)]
    files = [path for path in files if tests_of(path, ROOT)]
    chosen: list[Fault] = []
    draw = random.Random(given.seed)
    while len(chosen) < given.faults:  # a file first, so that each room has its share
        if faults := list(faults_of(draw.choice(files))):
            chosen.append(draw.choice(faults))
    os.environ.update(IMPORTED_WITH)
    with tempfile.TemporaryDirectory() as folder:
        tree, found = copy_source(Path(folder)), 0
        for number, fault in enumerate(chosen[part - 1 :: parts], start=1):
            is_red = is_found(fault, tree)
            found += is_red
            lines = (tree / OUTPUT).read_text().splitlines()
            by = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "no test")
            where = f"{fault.path.relative_to(ROOT)}:{fault.line}"
            print(f"{where}: {fault.old.strip()} -> {fault.new.strip()}")
            print(f"    {'found' if is_red else 'survived'}: {by}, {found} of {number}", flush=True)


if __name__ == "__main__":
    main()
