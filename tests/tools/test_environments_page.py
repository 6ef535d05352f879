"""The table of environments: how one is tried, and what the page must show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf.options.environments.keys import EnvironmentKind
from tools.docs import environments_page
from tools.docs.environments_page import Trial, try_environment

PAGE = (Path(__file__).parents[2] / "benchmarks/environments.md").read_text()
ROW = re.compile(r"^\| `([^`]+)` \| (\d+) \| (yes|no) \| (.*) \|$", re.MULTILINE)


def test_at_least_60_environments_run_and_replay_equal() -> None:
    rows = ROW.findall(PAGE)
    assert sum(equal == "yes" for _, _, equal, _ in rows) >= 60
    assert all(note for _, _, equal, note in rows if equal == "no"), "a failure has a reason"
    assert all(int(turns) > 0 for _, turns, equal, _ in rows if equal == "yes")


@pytest.mark.parametrize("kind", environments_page.PACKAGES)
def test_the_counts_of_a_section_are_those_of_its_rows(kind: EnvironmentKind) -> None:
    section = PAGE.partition(f"## {kind}\n")[2].partition("\n## ")[0]
    equal, total = map(int, re.search(r": (\d+) of (\d+) run and", section).groups())
    assert [row[2] for row in ROW.findall(section)].count("yes") == equal
    assert len(ROW.findall(section)) == total > 0


def test_an_environment_is_played_twice() -> None:
    trial = try_environment(EnvironmentKind.blackjack, None)
    assert trial == Trial("blackjack", 2, "optimum -0.046556", True)
