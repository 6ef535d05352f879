"""The import graph and the names of the package: short paths, no circles, no name used twice."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

from tests.structure.parsed import parsed
from tests.structure.test_layers import (
    FILES,
    ROOT,
    TYPE_CHECKING,
    imported_modules,
    run_at_import,
)

# The path that the documentation names, from the command to the loss.
PATH_TO_THE_LOSS = [
    "launch",
    "rlhf.runtime.launcher",
    "rlhf.runtime.worker",
    "rlhf.phases.ppo.loop",
    "rlhf.phases.ppo.objective",
    "rlhf.algorithms.ppo",
]
# In these folders the folder says which sft.py or zero.py is meant.
GROUPED = ("rlhf/algorithms/", "rlhf/config/schema/", "rlhf/phases/")


def module_of(path: str) -> str:
    """rlhf/base/errors.py -> rlhf.base.errors"""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of ``sources`` that it imports when it runs, inside functions too.

    But for options in functions: the core calls an option, which is built on the core.
    """
    modules = {module_of(path) for path in sources}
    graph = {}
    for path, source in sources.items():
        at_once = {name for _, name in imported_modules(run_at_import(parsed(source)), path)}
        later = {name for _, name in imported_modules(executed(source), path)}
        names = at_once | {name for name in later if not name.startswith("rlhf.options.")}
        found = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module_of(path)] = (found & modules) - {module_of(path)}
    return graph


def executed(source: str) -> Iterator[ast.AST]:
    """Yield the nodes of a file, but for what only type checkers read."""
    for node in parsed(source).body:
        if not (isinstance(node, ast.If) and ast.unparse(node.test) in TYPE_CHECKING):
            yield from ast.walk(node)


def repeated(names: Iterable[str]) -> list[str]:
    """Names that stand more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def file_names(paths: Iterable[str]) -> list[str]:
    """Names of files that must differ; in the grouped folders names of one group may repeat."""
    free = {Path(path).name for path in paths if path.startswith(GROUPED)}
    schema = ROOT / "rlhf/config/schema"  # of the config groups
    return [
        name
        for path in paths
        if (name := Path(path).name) not in {"__init__.py", "__main__.py"}
        and not plugs_in(path)
        and not (path.startswith(GROUPED) or (name in free and (schema / name).exists()))
    ]


# Modules that several options have, for the same purpose.
OF_OPTIONS = {"keys", "rules", "costs", "hooks"}


def plugs_in(path: str) -> bool:
    """The file is a module that several options have."""
    return path.startswith("rlhf/options/") and Path(path).stem in OF_OPTIONS


def public_names(source: str) -> list[str]:
    """Names of the classes, functions and type aliases of a file, unless they start with _."""
    names: list[str] = []
    for node in parsed(source).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.append(name)
            case ast.Assign(targets=[ast.Name(id=name)]) if (
                name != name.upper() and name[0].isupper()
            ):
                names.append(name)
    return [name for name in names if not name.startswith("_")]


def read_sources() -> dict[str, str]:
    """Path -> source, for each file of the package and launch.py."""
    return {path: (ROOT / path).read_text() for path in FILES}


@cache
def package_graph() -> dict[str, set[str]]:
    """The import graph of the package and launch.py."""
    return import_graph(read_sources())


def test_the_path_to_the_loss_is_the_documented_one() -> None:
    assert all(after in package_graph()[module] for module, after in pairwise(PATH_TO_THE_LOSS))


def test_no_modules_import_one_another_in_a_circle() -> None:
    TopologicalSorter(package_graph()).prepare()  # its error names the circle


def test_no_file_name_stands_twice() -> None:
    assert not repeated(file_names(FILES))


# Entry points, and the kernels that both devices have.
SAME_EVERYWHERE = {"main", "adamw_kernel", "average_kernel", "logprobs_kernel"}


def test_no_public_name_stands_twice() -> None:
    sources = (source for path, source in read_sources().items() if not plugs_in(path))
    names = (name for source in sources for name in public_names(source))
    assert set(repeated(names)) <= SAME_EVERYWHERE
