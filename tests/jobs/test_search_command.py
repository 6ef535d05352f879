"""Commands of searches: the space in Hydra's grammar, and a study that can be reached."""

from pathlib import Path

import pytest

from rlhf.jobs.search_command import Dimension, parse_search

STUDY = "study: {trials: 4, maximize: [ppo.gold_after]}\n"


@pytest.fixture
def definitions(tmp_path: Path) -> Path:
    (tmp_path / "grid.yaml").write_text("seed: [1, 2]\n")
    return tmp_path


def written(definitions: Path, text: str) -> Path:
    (definitions / "mine.yaml").write_text(text)
    return definitions


def test_other_commands_start_no_search(definitions: Path) -> None:
    written(definitions, STUDY + "seed: [1, 2]")
    for words in (["seed=1"], ["-m", "seed=1,2"], ["-m", "sweep=grid"], ["sweep=mine"]):
        assert parse_search(words, definitions) is None


def test_space_is_read_in_hydras_grammar(definitions: Path) -> None:
    text = STUDY + (
        "ppo.kl_ctl: tag(log, interval(0.01, 1))\nppo.lam: interval(0.5, 1.0)\n"
        "ppo.steps: int(interval(1, 8))\nseed: range(1, 4)\nppo.cliprange: [0.1, 0.2]\n"
        "experiment: smoke\n"
    )
    search = parse_search(["-m", "sweep=mine", "ppo.lam=0.9"], written(definitions, text))
    assert search is not None
    assert search.space == [
        Dimension("ppo.kl_ctl", 0.01, 1.0, is_log=True),
        Dimension("ppo.steps", 1, 8, is_integer=True),
        Dimension("seed", choices=("1", "2", "3")),
        Dimension("ppo.cliprange", choices=("0.1", "0.2")),
    ]
    assert [each.example_value for each in search.space] == ["0.01", "1", "1", "0.1"]
    assert search.fixed == ["experiment=smoke", "ppo.lam=0.9"], "the command's value goes first"


def test_more_trials_continue_the_same_search_and_other_values_start_another(
    definitions: Path,
) -> None:
    written(definitions, STUDY + "seed: [1, 2]")
    words = (["study.trials=9", "study.slots=2"], ["study.seed=2"], ["ppo.lam=0.9"])
    searches = [parse_search(["-m", "sweep=mine", *more], definitions) for more in ([], *words)]
    folders = [search.folder for search in searches if search is not None]
    assert folders[0] == folders[1]
    assert len(set(folders)) == 3
    assert searches[1] is not None
    assert searches[1].study.trials == 9
