"""Names in the documentation exist: keys, metrics, functions, tests, and pages for all of them."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from rlhf.config.choices import Phase
from rlhf.config.hydra_errors import schema_types
from rlhf.config.schema.run import AlarmName
from rlhf.run.metric_table import GROUPS
from rlhf.run.step_alarms import RULES

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


@pytest.mark.parametrize("page", PAGES)
def test_keys_exist(page: str) -> None:
    assert keys_of(TEXTS[page]) - FUNCTIONS - OTHER_NAMES <= KEYS.keys()


@pytest.mark.parametrize("page", PAGES)
def test_metrics_exist(page: str) -> None:
    assert metrics_of(TEXTS[page]) - OTHER_NAMES <= METRICS


def functions_of(name: str) -> set[str]:
    """Public functions and controllers of a module of rlhf/algorithms, as ``module.name``."""
    module = import_module(f"rlhf.algorithms.{name}")
    tree = ast.parse(inspect.getsource(module))
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {f"{name}.{each}" for each in found if not each.startswith("_")}


MODULES = sorted(path.stem for path in ROOT.glob("rlhf/algorithms/[a-z]*.py"))
FUNCTIONS = {each for name in MODULES for each in functions_of(name)} | {"kl.KlController"}


def test_every_algorithm_is_on_its_page() -> None:
    named = {word.partition("=")[0] for word in spans(TEXTS["docs/algorithms"])}
    assert named >= FUNCTIONS
    of_modules = {w for w in named if w.partition(".")[0] in MODULES and w not in KEYS}
    assert of_modules == FUNCTIONS


ROWS = [line for line in (DOCS / "elsewhere.md").read_text().splitlines() if "/issues/" in line]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_problem_has_a_thread_and_a_test_that_exists(row: str) -> None:
    _, problem, threads, here, test, _ = (cell.strip() for cell in row.split("|"))
    assert problem
    assert here
    for thread in threads.split(", "):
        link = re.fullmatch(r"\[[\w-]+#(\d+)\]\(https://github\.com/[\w/-]+/issues/(\d+)\)", thread)
        assert link is not None, thread
        assert link[1] == link[2], thread
    path, _, name = test.strip("`").partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test


def test_every_row_of_problems_is_checked() -> None:
    tables = (DOCS / "elsewhere.md").read_text()
    assert tables.count("| `tests/") == len(ROWS) >= 30


@pytest.mark.parametrize("name", AlarmName)
def test_every_alarm_has_a_remedy_and_its_condition(name: AlarmName) -> None:
    remedy, condition = re.findall(
        rf"^\| `{name}` \| (.+) \|$", TEXTS["docs/troubleshooting"], re.M
    )
    first, otherwise = remedy.split(" | ")
    assert first
    assert otherwise
    metric, _, steps = condition.split(" | ")
    if name in RULES:
        assert metric == f"`{RULES[name].metric}`"
        assert steps.startswith(f"{RULES[name].patience} ")


MEASURED = {"results.md", "performance.md"}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_measurements_stand_in_results_and_performance(page: Path) -> None:
    """A page that gives a time or a score of a machine names its processor."""
    names_a_processor = re.search(r"EPYC|Xeon|Zen \d", page.read_text(encoding="utf-8"))
    assert bool(names_a_processor) == (page.name in MEASURED)


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(
        page.read_text()
        for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
    )
    shown = set(re.findall(r"images/([\w.]+)", pages))
    assert {picture.name for picture in (DOCS / "images").iterdir()} == shown


SOURCES = [
    path
    for pattern in ("*.md", "Makefile", "*/**/*.py", "*/**/*.yaml", "*/**/*.md")
    for path in ROOT.glob(pattern)
    if not any(part.startswith(".") or part in OTHER_FOLDERS for part in path.parts)
]


def test_pages_exist_that_source_and_settings_name() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in SOURCES
        for page in re.findall(r"docs/[a-z_]{2,}\.md", path.read_text(encoding="utf-8"))
    }
    assert ("conf/config.yaml", "docs/operations.md") in named
    assert not {(by, page) for by, page in named if not (ROOT / page).is_file()}


def test_names_are_found() -> None:
    text = "a `ppo.gamma=1 seed=2` b `ppo/kl` `runs/x`\n```\n`ppo.lam`\n```\n"
    assert keys_of(text) == {"ppo.gamma"}
    assert metrics_of(text) == {"ppo/kl"}
