"""Who may import whom: the import rules of the architecture, read from the source with ``ast``."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.structure.parsed import nodes_of, parsed

ROOT = Path(__file__).parents[2]
FILES = [*sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("rlhf/**/*.py")), "launch.py"]

# The core trains, samples, logs, saves and resumes. Options are methods that a run can do without.
# Instruments prepare a run, or look at it. The core imports no instrument.
CORE = {"base", "config", "algorithms", "data", "models", "engine", "rollout", "rewards"}
CORE |= {"kernels", "run", "phases", "runtime"}
OPTIONS = {"options", "methods"}
INSTRUMENTS = {
    "chat",
    "compare",
    "evaluate",
    "export",
    "gpu_check",
    "jobs",
    "look",
    "plan",
    "replay",
    "report",
    "runs",
    "watch",
}
MOST_ROOMS = 26  # folders and files that a reader of rlhf/ meets first

# What each room may import of the others. Rooms from data to run do not import one another.
SHARED = {"base", "config", "methods", "options"}
KERNELS = {"kernels"}  # models, engines and decoders call them
MAY_IMPORT: dict[str, set[str]] = {
    "base": set(),
    "config": {"base", "methods", "options"},
    "methods": {"base", "config"},  # the public door: packages of others import it
    "algorithms": {"base"},
    "rewards": SHARED,
    **dict.fromkeys(("data", "run"), SHARED | {"algorithms"}),
    **dict.fromkeys(("models", "engine", "rollout"), SHARED | KERNELS | {"algorithms"}),
    "kernels": SHARED,
    "phases": CORE - {"runtime"} | OPTIONS,
    "runtime": CORE | OPTIONS,
    "options": CORE - {"runtime"} | {"methods", "chat", "plan", "report"},
    "plan": SHARED | {"models"},
    "jobs": SHARED | {"data", "models", "engine", "rollout", "rewards", "run", "runtime", "plan"},
    "report": SHARED | {"run"},
    "compare": SHARED | {"run", "data", "report"},
    "look": SHARED | {"data", "models", "run", "runtime", "jobs", "report"},
    "watch": SHARED | {"run", "report"},
    "runs": CORE | OPTIONS | {"report", "watch", "jobs", "evaluate", "replay", "chat"},
    "chat": SHARED | {"data", "models", "engine", "rollout", "run"},
    "export": CORE | OPTIONS | {"runs"},
    "evaluate": CORE | OPTIONS | {"export", "report"},
    "replay": SHARED | {"run", "runtime"},
    "gpu_check": CORE | OPTIONS | {"jobs", "plan"},
    "launch": SHARED | {"jobs", "report", "runtime"},
    "__init__": SHARED | {"phases", "runs"},  # the public names
    "__main__": {"base"},
}

# Doors of an instrument in a room of the core: nothing imports them, and people type their names.
COMMANDS = {"rlhf/data/__main__.py": "look"}
DOORS = tuple(path.removesuffix(".py").replace("/", ".") for path in COMMANDS)

# The only places that may import a module, and places that may not.
ONLY_IN = {
    "deepspeed": (
        "rlhf/engine/",
        "rlhf/options/hybrid_engine/hybrid_rollout.py",
        "rlhf/runtime/rendezvous.py",
    ),
    "triton": (
        "rlhf/kernels/gpu/adamw_triton.py",
        "rlhf/kernels/gpu/attention_triton.py",
        "rlhf/kernels/gpu/logprobs_triton.py",
    ),
    "wandb": ("rlhf/run/", "rlhf/report/dashboards.py"),
    "hydra": ("launch.py", "rlhf/config/", "rlhf/jobs/"),
}
TORCH_FREE = (
    *(path for path in FILES if path.startswith("rlhf/options/") and path.endswith("/costs.py")),
    "launch.py",
    "rlhf/base/cpu.py",
    "rlhf/config/",
    "rlhf/options/environments/adapters.py",
    "rlhf/options/environments/embedded.py",
    "rlhf/options/environments/environment_host.py",
    "rlhf/options/environments/interface.py",
    "rlhf/options/environments/keys.py",
    "rlhf/options/environments/process_pool.py",
    "rlhf/options/environments/tools.py",
    "rlhf/plan/",
    "rlhf/rewards/",
)
NEVER_IN = {
    "torch": TORCH_FREE,
    "rlhf.base.types": TORCH_FREE,
    "rlhf.base.ranks": TORCH_FREE,
    "rlhf.base.random_streams": TORCH_FREE,
    "transformers": ("rlhf/algorithms/",),
}
INSIDE_FUNCTIONS = {"deepspeed", "wandb", "transformers"}
NEEDS_GPU = set(ONLY_IN["triton"])  # Triton comes with torch for GPUs only
HEAVY = {"torch", "datasets", *INSIDE_FUNCTIONS}
TYPE_CHECKING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_modules(nodes: Iterable[ast.AST], path: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that the nodes import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.removesuffix(".py").split("/")[: -node.level] if node.level else []
            module = ".".join([*package, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def run_at_import(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that importing the module executes: not those in functions or for type checkers."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) in TYPE_CHECKING:
            pending.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending.extend(ast.iter_child_nodes(node))


def part_of(module: str) -> str | None:
    """The part of the architecture that a module belongs to: rlhf.base.types.Mean -> base."""
    top, *rest = module.split(".")
    known = {"rlhf": rest[0] if rest else "__init__", "rlhf_lab": "lab", "launch": "launch"}
    return known.get(top)


def check_direction(source: str, path: str) -> list[str]:
    """Imports of rlhf against the direction of the layers."""
    part = COMMANDS.get(path) or part_of(path.removesuffix(".py").replace("/", "."))
    if part not in MAY_IMPORT:
        return [f"{path}: {part} has no place in MAY_IMPORT"]
    return [
        f"{path}:{line}: {part} may not import {name}"
        for line, name in imported_modules(nodes_of(source), path)
        if part_of(name) not in {None, part, *MAY_IMPORT[part]} or name.startswith(DOORS)
    ]


def check_places(source: str, path: str) -> list[str]:
    """Third-party modules outside their places."""
    return [
        f"{path}:{line}: {name} may not be imported here"
        for line, name in imported_modules(nodes_of(source), path)
        if not path.startswith(places(ONLY_IN, name) or "")
        or path.startswith(places(NEVER_IN, name))
    ]


def places(rules: dict[str, tuple[str, ...]], name: str) -> tuple[str, ...]:
    """The paths that the rules give for a module or something in it."""
    return next((rules[module] for module in rules if f"{name}.".startswith(f"{module}.")), ())


def check_lazy(source: str, path: str) -> list[str]:
    """Heavy modules that importing the file would import."""
    return [
        f"{path}:{line}: import {name} inside the function that needs it"
        for statement in run_at_import(parsed(source))
        for line, name in imported_modules([statement], path)
        if name.split(".")[0] in INSIDE_FUNCTIONS
    ]


def check_auto_classes(source: str, path: str) -> list[str]:
    """Auto classes of transformers outside models/ and the trunk, which is a model."""
    if path.startswith(("rlhf/models/", "rlhf/options/trunk/")):
        return []
    names = (
        (node.lineno, name)
        for node in nodes_of(source)
        for name in (getattr(node, field, None) for field in ("id", "attr", "name"))
        if isinstance(name, str)
    )
    return [
        f"{path}:{line}: {name} belongs to rlhf/models/"
        for line, name in names
        if name.startswith(("AutoModel", "AutoTokenizer"))
    ]


def test_the_core_imports_no_instrument() -> None:
    for part in CORE:
        assert not MAY_IMPORT[part] & INSTRUMENTS, part
    assert CORE | OPTIONS | INSTRUMENTS | {"launch", "__init__", "__main__"} == MAY_IMPORT.keys()
    assert len(CORE | OPTIONS | INSTRUMENTS) <= MOST_ROOMS


Check = Callable[[str, str], list[str]]
CHECKS = [check_direction, check_places, check_lazy, check_auto_classes]


@pytest.mark.parametrize("check", CHECKS)
def test_source_follows_the_rule(check: Check) -> None:
    broken = [line for path in FILES for line in check((ROOT / path).read_text(), path)]
    assert not broken, "\n" + "\n".join(broken)


def imports_of(*statements: str) -> list[set[str]]:
    """Return the modules in memory after each of ``statements``, run by one new interpreter."""
    code = "import sys\n" + "".join(f"{each}\nprint(*sys.modules)\n" for each in statements)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return [set(line.split()) for line in run.stdout.splitlines()]


def everything_in(*parts: str) -> str:
    """The statement that imports every module of these parts of rlhf."""
    places = tuple(f"rlhf/{part}" for part in parts)
    paths = (path for path in FILES if path.startswith(places) and path not in NEEDS_GPU)
    return "import " + ", ".join(path.removesuffix(".py").replace("/", ".") for path in paths)


def test_light_parts_import_nothing_heavy() -> None:
    light = ("config", "base/errors", "plan", "models/shapes", "models/model_uses")
    package, parts = imports_of("import rlhf", everything_in(*light))
    assert "rlhf.config.freeze" in parts
    assert not HEAVY & (package | parts)


OPTION = re.compile(r"rlhf\.options\.(\w+)\.\w+")


@pytest.mark.slow
def test_a_default_run_imports_no_option_and_no_module_imports_the_lazy_ones() -> None:
    """But for the table, keys, rules and the kernels of the device of the run."""
    run = "import rlhf.jobs.job, rlhf.runtime.worker"
    of_run, all_modules = imports_of(run, everything_in(""))
    modules = [name for name in of_run if OPTION.fullmatch(name)]
    always = re.compile(r".*\.(keys|\w*rules|costs)")
    found = {name.removeprefix("rlhf.options.") for name in modules if not always.fullmatch(name)}
    assert not found
    assert "torch" in all_modules
    assert not INSIDE_FUNCTIONS & all_modules


def test_no_option_imports_another() -> None:
    for path in FILES:
        own = OPTION.match(path.removesuffix(".py").replace("/", "."))
        for _, name in imported_modules(nodes_of((ROOT / path).read_text()), path):
            other = OPTION.match(name)
            assert not own or not other or own[1] == other[1], (path, name)
