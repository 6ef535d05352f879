"""Names in the documentation exist: keys, metrics, functions, tests, and pages for all of them."""

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from rlhf.config.choices import Phase
from rlhf.config.hydra_errors import schema_types
from rlhf.config.schema.run import AlarmName
from rlhf.run.metric_table import GROUPS
from rlhf.run.step_alarms import RULES
from tests.needs_lab import needs_lab

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Pages that name keys and metrics in sentences.
NAMES = ("elsewhere", "troubleshooting", "tutorial", "algorithms", "watching")
PAGES = ["README", *(f"docs/{name}" for name in NAMES)]
TEXTS = {page: (ROOT / f"{page}.md").read_text() for page in PAGES}
KEYS = schema_types()
TOP = {key for key in KEYS if "." not in key}
METRICS = {name for group in GROUPS.values() for name in group}
OTHER_NAMES = {"alarms.jsonl", "ppo/actor", "ppo/samples", *(f"{p}/step" for p in Phase)}
OTHER_FOLDERS = {"runs", "build", "outputs"}
PHASES = r"(?:ppo|sft|reward|dpo|time|speed|memory)"


def spans(text: str) -> list[str]:
    """Words in `code spans` outside of fences."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [word for span in re.findall(r"`([^`\n]+)`", prose) for word in span.split()]


def keys_of(text: str) -> set[str]:
    """Keys that code spans name, as ``group.key`` or ``key=value``."""
    words = {word.partition("=")[0] for word in spans(text)}
    return {w for w in words if re.fullmatch(rf"(?:{'|'.join(TOP)})\.[a-z_.]+", w)}


def metrics_of(text: str) -> set[str]:
    """Metrics that code spans name."""
    return {word for word in spans(text) if re.fullmatch(rf"{PHASES}/[a-z0-9_]+", word)}


@needs_lab
def test_keys_and_metrics_exist() -> None:
    keys, metrics = KEYS.keys() | FUNCTIONS | OTHER_NAMES, METRICS | OTHER_NAMES
    for page, text in TEXTS.items():
        assert keys_of(text) <= keys, page
        assert metrics_of(text) <= metrics, page


def functions_of(name: str) -> set[str]:
    """Public functions and controllers of a module of rlhf/algorithms, as ``module.name``."""
    module = import_module(f"rlhf.algorithms.{name}")
    tree = ast.parse(inspect.getsource(module))
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {f"{name}.{each}" for each in found if not each.startswith("_")}


MODULES = sorted(path.stem for path in ROOT.glob("rlhf/algorithms/[a-z]*.py"))
CONTROLLERS = {"kl.KlController", "entropy.EntropyController"}
FUNCTIONS = {each for name in MODULES for each in functions_of(name)} | CONTROLLERS


@needs_lab
def test_every_algorithm_is_on_its_page() -> None:
    named = {word.partition("=")[0] for word in spans(TEXTS["docs/algorithms"])}
    assert named >= FUNCTIONS
    of_modules = {w for w in named if w.partition(".")[0] in MODULES and w not in KEYS}
    assert of_modules == FUNCTIONS


def test_every_problem_has_a_test_that_exists() -> None:
    lines = (DOCS / "elsewhere.md").read_text().splitlines()
    rows = [line for line in lines if "/issues/" in line]
    assert len(rows) >= 30
    for row in rows:
        _, problem, _, here, test, _ = (cell.strip() for cell in row.split("|"))
        assert problem
        assert here
        path, _, name = test.strip("`").partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test


def test_every_alarm_has_a_remedy_and_its_condition() -> None:
    for name in AlarmName:
        row = rf"^\| `{name}` \| (.+) \|$"
        remedy, condition = re.findall(row, TEXTS["docs/troubleshooting"], re.M)
        assert all(remedy.split(" | ")), name
        metric, _, steps = condition.split(" | ")
        if name in RULES:
            assert metric == f"`{RULES[name].metric}`"
            assert steps.startswith(f"{RULES[name].patience} ")


def sources() -> Iterator[Path]:
    """Yield the pages, source and settings of the project."""
    for pattern in ("*.md", "Makefile"):
        yield from ROOT.glob(pattern)
    folders = (path for path in ROOT.iterdir() if path.is_dir())
    for folder in (f for f in folders if f.name[0] != "." and f.name not in OTHER_FOLDERS):
        for kind in ("py", "yaml", "md"):
            yield from folder.rglob(f"*.{kind}")


def test_pages_exist_that_source_and_settings_name() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in sources()
        for page in re.findall(r"docs/[a-z_]{2,}\.md", path.read_text(encoding="utf-8"))
    }
    assert ("conf/config.yaml", "docs/operations.md") in named
    assert not {(by, page) for by, page in named if not (ROOT / page).is_file()}
