"""Commands of searches: the space in Hydra's grammar, and a study that can be reached."""

from pathlib import Path

import pytest

from rlhf.base.errors import ConfigError
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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("study: {trials: 4}\nseed: [1, 2]", "give maximize or minimize"),
        ("study: {maximize: [ppo.gold_after]}\nseed: [1, 2]", "trials"),
        (STUDY.replace("4", "0") + "seed: [1, 2]", "trials and slots must be above 0"),
        (STUDY.replace("ppo.gold_after", "gold") + "seed: [1, 2]", "gold must be PHASE.NAME"),
        (STUDY.replace("trials", "trails") + "seed: [1, 2]", "trails"),
        (STUDY + "study2: 1\nseed: 1", "no key has an interval"),
        (STUDY + "ppo.lam: tag(log, interval(0, 1))", "LOW < HIGH"),
        (STUDY + "ppo.lam: interval(1, 0.5)", "LOW < HIGH"),
        (STUDY + "ppo.lam: interval(1", "sweep=mine"),
        (STUDY + "ppo.lam: glob(*)", "give an interval, a range or a choice"),
        (
            "study: {trials: 4, maximize: [a.b, a.c], prune: {metric: x}}\nseed: [1, 2]",
            "a study with 2 objectives cannot compare unfinished trials",
        ),
        ("study: {trials: 4, maximize: [a.b], sampler: best}\nseed: [1, 2]", "best"),
        ("study: {trials: 4, maximize: [a.b], stop_on: [loud]}\nseed: [1, 2]", "loud"),
    ],
)
def test_wrong_studies_are_refused_with_the_reason(
    text: str, reason: str, definitions: Path
) -> None:
    with pytest.raises(ConfigError, match=r"mine|interval|glob") as refused:
        parse_search(["-m", "sweep=mine"], written(definitions, text))
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("text", "word", "message"),
    [
        ("minutes: 3", "seed=1", r"sweep=mine, minutes: belongs to a sweep, .*study\.trials$"),
        ("zip: {a: [1]}", "seed=1", r"sweep=mine, zip: belongs to a sweep, .*study\.trials$"),
        ("seeds: 3", "seed=1", r"sweep=mine, seeds: belongs to a sweep, .*study\.trials$"),
        ("", "dollars=3", "sweep=mine, dollars: belongs to a sweep"),
        ("", "hydra/launcher=joblib", "hydra/launcher=joblib: sweep=mine is a study, .* leave"),
        ("", "hydra.sweep.dir=here", r"hydra\.sweep\.dir=here: sweep=mine is a study, .* leave"),
        ("", "data.path=../a/b,c", r"data\.path=\.\./.* in a sweep: .*an absolute path$"),
    ],
)
def test_words_that_a_study_does_not_read_are_refused(
    text: str, word: str, message: str, definitions: Path
) -> None:
    folder = written(definitions, f"{STUDY}seed: [1, 2]\n{text}")
    with pytest.raises(ConfigError, match=f"^{message}"):
        parse_search(["-m", "sweep=mine", word], folder)
