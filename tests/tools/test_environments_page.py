"""The table of environments: how one is tried, and what the page must show."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from rlhf.options.environments.keys import EnvironmentKind
from tools.docs import environments_page
from tools.docs.environments_page import Trial, next_turn, replace_section, try_environment

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


def test_an_environment_that_is_not_there_has_a_reason() -> None:
    trial = try_environment(EnvironmentKind.custom, "some")
    assert not trial.is_equal
    assert "kind=custom does not read it" in trial.note


def test_episodes_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments_page, "play_one", lambda pool, episode, seed: [episode])
    trial = try_environment(EnvironmentKind.blackjack, None)
    assert (trial.is_equal, trial.note) == (False, "two episodes with seed 1 differ")


def test_turns_follow_the_examples_in_the_text() -> None:
    rng = Random(0)
    assert next_turn(["stick, hit? you 12 dealer 3"], rng) in ("stick", "hit")
    assert next_turn(["Move with '[A C]'."], rng) == "[A C]"
    assert next_turn(["Is this right? Yes, it is."], rng) in environments_page.CANNED


def test_a_section_is_replaced_and_the_others_stay() -> None:
    page = replace_section("# Title\n", EnvironmentKind.gem, "## gem\n\na\n")
    page = replace_section(page, EnvironmentKind.textarena, "## textarena\n\nb\n")
    assert replace_section(page, EnvironmentKind.gem, "## gem\n\nc\n") == (
        "# Title\n\n## gem\n\nc\n\n## textarena\n\nb\n"
    )
