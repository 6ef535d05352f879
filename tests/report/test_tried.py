"""Verdicts count all settings that were tried on a question, and say how many more seeds decide."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhf.config.freeze import to_run_config
from rlhf.report import __main__ as report
from rlhf.report.compare_runs import note_lines, sweep_page
from rlhf.report.comparison import ComparedRun, Setting, Tried
from rlhf.report.differences import SettingsComparison, compare_with_first, estimate_difference
from tests.conftest import Compose
from tests.documents import read_document

Capture = pytest.CaptureFixture[str]
WriteRun = Callable[..., Path]
KL = "kl_ctl: 0.28\n"


@pytest.fixture
def write_run(tmp_path: Path, compose: Compose) -> WriteRun:
    """Write the folder of a run by hand, below tmp_path; each began later than the one before."""
    text = OmegaConf.to_yaml(to_run_config(compose(["data.size=2000", "seed=1"])))
    assert KL in text

    def write(name: str, kl_ctl: float, seed: int, gold: float | None, **changed: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        own = text.replace(KL, f"kl_ctl: {kl_ctl}\n").replace("seed: 1\n", f"seed: {seed}\n")
        for old, new in changed.items():
            assert old in own
            own = own.replace(old, new)
        (folder / "config.yaml").write_text(own)
        (folder / "metrics.jsonl").touch()
        if gold is not None:
            measured: dict[str, Any] = {"hours": 0.1}
            ppo = {"score_before": 0.1, "score_after": gold, "kl_to_reference": 1.0, "seconds": 1}
            phases = {"ppo": ppo | {"gold_after": gold, "measured": measured}}
            result = {"objective": gold, "phases": phases, "versions": {}, "measured": measured}
            (folder / "result.json").write_text(json.dumps(result))
        os.utime(folder / "config.yaml", (write.count,) * 2)  # type: ignore[attr-defined]
        write.count += 1  # type: ignore[attr-defined]
        return folder

    write.count = 1_700_000_000  # type: ignore[attr-defined]
    return write


def compared(capsys: Capture, *words: object) -> dict[str, Any]:
    """Return what the command prints with --json."""
    capsys.readouterr()
    assert report.main([*map(str, words), "--json"]) == 0
    return read_document("report", capsys.readouterr().out)


def a_sweep(write_run: WriteRun, name: str, kls: Sequence[float]) -> Path:
    """Write a sweep of three seeds, in which only a larger kl_ctl is better, without noise."""
    for kl in kls:
        for seed in (1, 2, 3):
            run = write_run(f"{name}/{kl},{seed}", kl, seed, kl + seed / 10 + kl * seed / 1000)
    return run.parent


def test_a_comparison_counts_what_was_tried_on_its_question(
    write_run: WriteRun, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = a_sweep(write_run, "runs/sweeps/kl", (0.1, 0.2))
    (tmp_path / "runs/latest").symlink_to(sweep / "0.1,1")
    assert compared(capsys, sweep)["tried"] == {
        "settings": 2,
        "places": [str(tmp_path / "runs")],
        "is_reference_chosen": False,
        "corrected_for": 2,
    }, "of score and gold"
    write_run("runs/pets/other", 0.3, 1, 0.5)
    write_run("runs/pets/unfinished", 0.4, 1, None)
    write_run("runs/pets/same", 0.1, 4, 0.5)
    write_run("runs/pets/edited", 0.1, 4, 0.5)
    found = compared(capsys, sweep)["tried"]
    assert found["settings"] == 5, "with the unfinished run, and the repeated one"
    assert found["corrected_for"] == 8
    (write_run("runs/pets/begun", 0.6, 1, None) / "metrics.jsonl").unlink()
    write_run("runs/pets/more", 0.7, 1, 0.5, **{"size: 2000": "size: 4000"})
    write_run("runs/pets/sft", 0.8, 1, 0.5, **{"  - ppo\n": ""})
    write_run("runs/pets/model", 0.9, 1, 0.5, **{"hidden_size: ": "hidden_size: 1"})
    (write_run("runs/pets/damaged", 0.9, 1, 0.5) / "config.yaml").write_bytes(b"\xff")
    (write_run("elsewhere/a", 0.9, 1, 0.5))
    assert compared(capsys, sweep)["tried"] == found, "other questions and other places"
    monkeypatch.chdir(tmp_path)
    assert report.main(["runs/sweeps/kl"]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    line = "2 of 5 settings tried on this question in runs are compared; corrected for 8"
    assert line in said
    assert "--registry FOLDER counts only the runs in FOLDER; choose it before" in said
    assert line in (sweep / "sweep.html").read_text()


def test_a_reference_that_can_be_chosen_counts_every_pair(
    write_run: WriteRun, tmp_path: Path, capsys: Capture
) -> None:
    sweep = a_sweep(write_run, "runs/sweeps/kl", (0.1, 0.2, 0.3))
    low, middle, high = ([sweep / f"{kl},{seed}" for seed in (1, 2, 3)] for kl in (0.1, 0.2, 0.3))
    first = compared(capsys, *low[1:], *high[1:])["tried"]
    assert (first["is_reference_chosen"], first["settings"]) == (False, 3), "0.1 was tried first"
    assert compared(capsys, *high, *low)["tried"]["is_reference_chosen"]
    chosen = compared(capsys, *middle, *high)
    assert chosen["tried"]["corrected_for"] == 2 * 3
    page = tmp_path / "page.html"
    words = [*middle, *high, "--registry", sweep, "--html", page]
    assert report.main([*map(str, words)]) == 0
    told = "corrected for 6 differences (every pair, because the baseline was not the"
    assert told in capsys.readouterr().out.replace("\n", " ")
    assert told in page.read_text()
    twice = compared(capsys, *low, *low)["tried"]
    assert (twice["settings"], twice["corrected_for"]) == (3, 0), "no spread: nothing is tested"
    small = tmp_path / "small"
    small.mkdir()
    assert compared(capsys, *middle, *high, "--registry", small)["tried"] == {
        "settings": 2,
        "places": [str(small)],
        "is_reference_chosen": False,
        "corrected_for": 2,
    }
    later = a_sweep(write_run, "runs/sweeps/later", (0.4, 0.5))
    assert not compared(capsys, later)["tried"]["is_reference_chosen"], "the first of its folder"
    assert report.main([str(sweep), "--registry", str(tmp_path / "none")]) == 2
    assert "--registry=" in capsys.readouterr().err


def test_scores_of_other_judges_are_other_questions(write_run: WriteRun, capsys: Capture) -> None:
    files = {"source: synthetic": "source: local", "  path: null\n  sets": "  path: a\n  sets"}
    ours = [write_run(f"runs/a/{seed}", 0.1, seed, 0.5, **files) for seed in (1, 2)]
    write_run("runs/a/tried", 0.2, 1, 0.5, **files)
    rewards = "rewards:\n  length:\n    kind: length\n"
    write_run("runs/a/judged", 0.3, 1, 0.5, **files, **{"rewards: {}\n": rewards})
    write_run("runs/b/other", 0.4, 1, 0.5, **files | {"  path: null\n  sets": "  path: b\n  sets"})
    assert compared(capsys, *ours)["tried"]["settings"] == 2


def equal_settings(draws: random.Random, count: int, seeds: int) -> list[Setting]:
    """Return settings that are equal in truth, in two measures; a seed matters as much as chance.

    The measures of a run are alike, as they are in runs: an answer that is right has a high score.
    """
    by_seed = [draws.gauss(0, 1) for _ in range(seeds)]

    def run(n: int, seed: int) -> ComparedRun:
        return a_run(n, seed, by_seed[seed] + draws.gauss(0, 1), draws.gauss(0, 0.3))

    return [Setting({"n": n}, [run(n, seed) for seed in range(seeds)]) for n in range(count)]


def a_run(setting: int, seed: int, gold: float, other: float | None = None) -> ComparedRun:
    measures = {"objective": gold, "gold": gold}
    measures |= {} if other is None else {"exactly right": gold + other}
    return ComparedRun(Path(f"{setting}-{seed}"), {"seed": seed, "n": setting}, measures)


def says_better(found: SettingsComparison) -> bool:
    return any(found.verdict(*place) in {"higher", "lower"} for place in found.differences)


def test_searches_of_equal_settings_end_without_a_better_one() -> None:
    draws, wrong, wrong_of_chosen, uncorrected = random.Random(0), 0, 0, 0
    for number in range(200):
        settings = equal_settings(draws, 6, 4)
        ranked = sorted(settings, key=lambda each: each.estimates()["gold"].mean)
        found = compare_with_first(settings, Tried(6))
        wrong += says_better(found)
        if says_better(found) or not number:
            page = sweep_page("", settings, tried=Tried(6))
            told = re.findall('class="told">(higher|lower)', page)
            assert len(told) == sum(title == "gold" for _, title in found.significant)
        if number % 8 == 0:
            part = compare_with_first([settings[0], ranked[-1]], Tried(6))
            assert says_better(part) <= says_better(found), "parts of a table tell no more"
        extremes = [ranked[0], ranked[-1]]
        chosen = compare_with_first(extremes, Tried(6, is_baseline_chosen=True))
        wrong_of_chosen += says_better(chosen)
        uncorrected += says_better(compare_with_first(extremes))
    assert wrong <= 0.05 * 200
    assert wrong_of_chosen <= 0.05 * 200
    assert uncorrected > 0.12 * 200, "the best and the worst, as if no other had been tried"


def test_a_large_difference_is_found_among_many() -> None:
    draws, told = random.Random(2), 0
    for _ in range(40):
        settings = equal_settings(draws, 9, 8)
        better = [a_run(5, run.seeds[0], gold=run.measures["gold"] + 4) for run in settings[5].runs]
        settings[5] = settings[5]._replace(runs=better)
        found = compare_with_first(settings, Tried(27))
        told += found.verdict(5, "gold") == "higher"
        assert sum(found.verdict(n, "gold") != "-" for n in range(1, 9)) <= 2
    assert told >= 0.8 * 40


def test_seeds_are_asked_for_that_tell_the_difference() -> None:
    # A mean difference of one standard deviation of the pairs: 10 pairs have a power of 80 % at 5 %
    # (G*Power, two-sided t-test of matched pairs, dz = 1), and so 6 more than 4.
    half = 0.75**0.5
    pairs = [1 + half, 1 + half, 1 - half, 1 - half]
    settings = [
        Setting({"n": 0}, [a_run(0, seed, gold=0.0) for seed in range(4)]),
        Setting({"n": 1}, [a_run(1, seed, gold=gain) for seed, gain in enumerate(pairs)]),
    ]
    found = compare_with_first(settings)
    assert found.verdict(1, "gold") == "-"
    assert found.more_seeds(1, "gold") == 6
    assert found.verdict_text(1, "gold") == "unclear (+6)"
    of_many = compare_with_first(settings, Tried(27)).more_seeds(1, "gold")
    assert isinstance(of_many, int)
    assert 6 < of_many < 40
    none = [a_run(1, seed, gold=gold) for seed, gold in enumerate((1.0, -1.0, 1.0, -0.99))]
    settings[1] = settings[1]._replace(runs=none)
    assert compare_with_first(settings).more_seeds(1, "gold") == ">100"
    large = [a_run(1, seed, gold=5 + seed / 10) for seed in range(4)]
    settings[1] = settings[1]._replace(runs=large)
    assert compare_with_first(settings).more_seeds(1, "gold") is None, "it is told"


def with_prompts(run: ComparedRun, golds: Sequence[float | None], tokens: int = 3) -> ComparedRun:
    before = {"tokens": [float(tokens)] * len(golds)}
    return run._replace(by_prompt={"before": before, "after": {"gold/gold": golds}})


def test_prompts_explain_a_share_of_the_variance_over_seeds() -> None:
    # Per pair: differences of prompts -1, 1 around its mean, whose variance 2 / 2 prompts is 1.
    # Variance of the pairs' means 0, 2, 4 is 4: prompts explain a quarter.
    ours = [with_prompts(a_run(0, seed, gold=0.0), [0.0, 0.0]) for seed in range(3)]
    means = ((seed, 2.0 * seed) for seed in range(3))
    theirs = [with_prompts(a_run(1, seed, gold=x), [x - 1, x + 1]) for seed, x in means]

    def share(*others: ComparedRun) -> float | None:
        found = estimate_difference(Setting({}, ours), Setting({}, list(others)), "gold")
        return found.prompt_share

    assert share(*theirs) == pytest.approx(0.25)
    settings = [Setting({}, ours), Setting({}, theirs)]
    notes = " ".join(note_lines(settings, compare_with_first(settings)))
    assert "Noise from single prompts is 25% to 25% of the variance" in notes
    assert share(*theirs[:2], with_prompts(theirs[2], [3.0, 5.0], tokens=4)) is None, "others"
    assert share(*theirs[:2], with_prompts(theirs[2], [3.0, None])) is None, "not finite"
    assert share(*theirs[:2], with_prompts(theirs[2], [3.0, 4.0, 5.0])) is None, "more prompts"
    assert share(*theirs[:2], a_run(1, 2, gold=4.0)) is None, "no file"
    strangers = [run._replace(keys={"seed": run.seeds[0] + 5}) for run in theirs]
    assert share(*strangers) is None, "no pairs"
    golds = ((run, run.measures["gold"]) for run in theirs)
    assert share(*(with_prompts(run, [gold - 9, gold + 9]) for run, gold in golds)) == 1.0
