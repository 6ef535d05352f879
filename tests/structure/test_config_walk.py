"""The way of the configuration is short, and launch.py only hands over."""

from __future__ import annotations

import ast

import pytest

from tests.structure.test_layers import ROOT
from tools.config_walk import STARTS, num_visits, read_functions, read_sources, visited

# What the walk found when this was written: the rules of config/rules are a third of them. To
# check the data of each phase in plans, at starts and on other nodes takes 37 visits; the rules of
# the reward model, which read six groups, take 6, and what from_run leaves at other values takes 1.
FUNCTIONS = 101
VISITS = 353
LAUNCH_LINES = 150
LAUNCH_NAMES = 25

SOURCES = {
    "launch": (
        "from rlhf.a import Reader, check, take\n"
        "def main(cfg):\n    config = take(cfg)\n    check(config.ppo)\n    check(config)\n"
        "    Reader(size=1, of=config)\n    late(x, config)\n"
    ),
    "rlhf.a": (
        "class Reader:\n"
        "    def __init__(self, size, of):\n        self.read(of)\n"
        "    def read(self, values):\n        check(values)\n"
        "    def unread(self, values): ...\n"
        "def take(cfg): ...\n"
        "def check(values): ...\n"
        "def other(config):\n    check(config)\n"
    ),
}


def test_walk_follows_whole_configurations() -> None:
    functions = read_functions(SOURCES)
    found = visited(functions, ["launch.main"])
    assert found == {
        "launch.main": "",
        "rlhf.a.take": "launch.main",
        "rlhf.a.check": "launch.main",
        "rlhf.a.Reader.__init__": "launch.main",
        "rlhf.a.Reader.read": "rlhf.a.Reader.__init__",
    }
    assert num_visits(functions, ["launch.main"]) == 6, "check is visited twice"
    parts = SOURCES | {"launch": "from rlhf.a import check\ndef main(cfg):\n    check(cfg.ppo)\n"}
    assert list(visited(read_functions(parts), ["launch.main"])) == ["launch.main"]


def test_configuration_visits_few_functions() -> None:
    functions = read_functions(read_sources())
    advice = "pass a group or a value of the configuration; or raise the cap, and say why"
    assert len(visited(functions, STARTS)) <= FUNCTIONS, advice
    assert num_visits(functions, STARTS) <= VISITS, advice


def imported_names(source: str) -> set[str]:
    """Names that a module imports, at any depth; annotations are a feature, not a name."""
    return {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    } - {"annotations"}


def test_launch_hands_over() -> None:
    source = (ROOT / "launch.py").read_text()
    assert len(source.splitlines()) <= LAUNCH_LINES
    assert len(imported_names(source)) <= LAUNCH_NAMES


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from __future__ import annotations\nimport os", {"os"}),
        ("from a import b as c, d\ndef f():\n    import e.g", {"c", "d", "e.g"}),
    ],
)
def test_imported_names_are_counted(source: str, names: set[str]) -> None:
    assert imported_names(source) == names
