"""Pairs of answers in random order, and the files that keep what a person chose."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rlhf.base.errors import ConfigError
from rlhf.compare.__main__ import Comparison, main
from rlhf.compare.preference_file import (
    Answer,
    AnsweringModel,
    AnswerPair,
    PreferenceFile,
    Verdict,
    WinRate,
    make_pairs,
    read_models_of_file,
    read_models_of_runs,
)
from rlhf.data.tables import read_table_rows
from tests.compare.compared import prompt, run_with
from tests.documents import read_document

ONE, TWO = AnsweringModel("one", {"p": "x", "q": "y"}), AnsweringModel("two", {"p": "z", "q": "w"})
MODELS = ("one", "two")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[PreferenceFile]:
    with closing(PreferenceFile(tmp_path / "p.jsonl")) as opened:
        yield opened


def pair(number: int) -> AnswerPair:
    return AnswerPair(f"p{number}", Answer("one", f"x{number}"), Answer("two", f"y{number}"))


def test_ppo_is_compared_with_sft_or_with_another_run(tmp_path: Path) -> None:
    run = run_with(tmp_path / "smoke" / "a", before=["old"], after=["new"])
    other = run_with(tmp_path / "smoke" / "b", before=["old"], after=["other"])
    assert read_models_of_runs(run, None) == (
        AnsweringModel("smoke/a, PPO step 8", {prompt(0): "new"}),
        AnsweringModel("smoke/a, SFT", {prompt(0): "old"}),
    )
    assert read_models_of_runs(run, other)[1] == ("smoke/b, PPO step 8", {prompt(0): "other"})


def test_the_seed_decides_who_is_on_the_left() -> None:
    first = AnsweringModel("one", {f"p{i}": "x" for i in range(100)} | {"alone": "x", "same": "s"})
    second = AnsweringModel("two", {f"p{i}": "y" for i in range(100)} | {"same": "s"})
    pairs = make_pairs(first, second, seed=0)
    assert [each.prompt for each in pairs] == [f"p{i}" for i in range(100)]
    assert {frozenset((a, b)) for _, a, b in pairs} == {frozenset((("one", "x"), ("two", "y")))}
    lefts = [each.a.model for each in pairs]
    assert 35 <= lefts.count("one") <= 65
    assert [each.a.model for each in make_pairs(first, second, seed=0)] == lefts
    assert [each.a.model for each in make_pairs(first, second, seed=1)] != lefts
    backwards = make_pairs(second, first, seed=0)[0]
    assert backwards.prompt_and_answers == pairs[0].prompt_and_answers


def test_two_models_of_a_file_of_answers(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    rows = [("p", "x", "sft"), ("p", "y", "ppo"), ("p", "again", "ppo"), ("q", "", "ppo")]
    keys = ("prompt", "response", "model")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    sft, ppo = ("sft", {"p": "x"}), ("ppo", {"p": "y", "q": ""})
    assert read_models_of_file(path, ()) == (sft, ppo)
    assert read_models_of_file(path, ("ppo", "sft")) == (ppo, sft)
    for names in (("ppo",), ("ppo", "dpo"), ("ppo", "ppo")):
        with pytest.raises(ConfigError, match="has answers from sft, ppo: name two of these"):
            read_models_of_file(path, names)


def test_preferences_are_rows_of_data_local_and_the_others_are_not(
    file: PreferenceFile, tmp_path: Path
) -> None:
    for number, verdict in enumerate(Verdict):
        file.add_choice(pair(number), verdict)
    assert [row.values for row in read_table_rows(tmp_path / "p.jsonl")] == [
        {"prompt": "p0", "chosen": "x0", "rejected": "y0"}
        | {"chosen_by": "one", "rejected_by": "two", "shown_first": "one"},
        {"prompt": "p1", "chosen": "y1", "rejected": "x1"}
        | {"chosen_by": "two", "rejected_by": "one", "shown_first": "one"},
    ]
    undecided = [row.values for row in read_table_rows(tmp_path / "p.undecided.jsonl")]
    assert [row["verdict"] for row in undecided] == ["tie", "both_bad"]
    assert not any({"chosen", "rejected"} & row.keys() for row in undecided)
    winners = [winner for _, winner in PreferenceFile(file.path).read_choices()]
    assert winners == ["one", "two", None, None]


def test_rows_of_others_in_the_file_stay_and_do_not_count(file: PreferenceFile) -> None:
    path = file.path
    ours = '{"prompt": "p", "chosen": "a", "rejected": "b"}\n[1]\n{"chosen_by": 1}\n'
    path.write_text(ours)
    file.add_choice(pair(0), Verdict.a)
    assert path.read_text().startswith(ours)
    assert len(list(file.read_choices())) == 1
    path.write_text('{"prompt": "p"')
    with pytest.raises(ConfigError, match=r"p\.jsonl ends in the middle of a line: complete"):
        PreferenceFile(path)


def test_a_file_that_cannot_be_written_is_named(file: PreferenceFile) -> None:
    file.path.mkdir()
    with pytest.raises(ConfigError, match=r"p\.jsonl cannot be written \(Is a directory\)"):
        file.add_choice(pair(0), Verdict.a)


def test_a_second_page_continues_with_what_is_not_judged(file: PreferenceFile) -> None:
    one, two = (AnsweringModel(name, {p: f"{name} {p}" for p in "pqrs"}) for name in MODELS)
    first = Comparison((one, two), file, seed=0)
    pairs, turned = (make_pairs(one, two, seed=seed) for seed in (0, 1))
    assert pairs != turned
    first.judge(Verdict.b, index=0)
    first.judge(Verdict.b, index=0)  # a second click, or another tab that shows the first pair
    first.judge(None, index=1)
    first.judge(Verdict.tie, index=2)
    assert (first.current_pair, first.progress_text) == (pairs[3], "4 of 4")
    second = Comparison((one, two), PreferenceFile(file.path), seed=1)
    assert [second.current_pair, second.progress_text] == [turned[1], "1 of 2"]
    is_loss = pairs[0].b.model == "two"
    assert second.win_rate == WinRate(MODELS, 1 - is_loss, is_loss, undecided=1)


def test_win_rate_by_hand(file: PreferenceFile) -> None:
    assert str(WinRate.from_choices(MODELS, [])) == "No choice yet between one and two."
    for number, verdict in enumerate([Verdict.a] * 7 + [Verdict.b, Verdict.tie, Verdict.both_bad]):
        file.add_choice(pair(number), verdict)
    file.add_choice(AnswerPair("p", Answer("one", "x"), Answer("three", "y")), Verdict.a)
    # 8 of 10, see test_wilson_interval_by_hand
    assert str(WinRate.from_choices(MODELS, list(file.read_choices()))) == (
        "one was preferred to two in 80% of 10 comparisons (95 % interval 49% to 94%): "
        "7 better, 1 worse, 2 undecided, which count half."
    )
    assert WinRate(MODELS, 7, 1, 2).as_json()["win_rate"] == pytest.approx(0.8)


def test_choices_are_counted_for_a_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_with(tmp_path / "runs" / "run", ["old"], ["new"])
    assert main([str(run_dir), "--json"]) == 0
    found = read_document("compare", capsys.readouterr().out)
    assert (found["wins"], found["losses"], found["win_rate"]) == (0, 0, None)
    (pair,) = make_pairs(*read_models_of_runs(run_dir, None), seed=0)
    with closing(PreferenceFile(Path(found["choices"]))) as file:
        file.add_choice(pair, Verdict.a)
    assert main([str(run_dir), "--json"]) == 0
    found = read_document("compare", capsys.readouterr().out)
    assert found["wins"] + found["losses"] == 1
    assert found["win_rate"] == found["wins"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "no runs/latest in this folder; name the directory of a run, or start one with rlhf"),
        (["{run}", "--answers", "a.jsonl"], "name either RUN_DIR or --answers FILE"),
        (["{run}/.."], "is not the directory of a run: it has no config.yaml"),
        (["{run}", "--against", "{run}"], "must be a different run from"),
        (["{unfinished}"], "has no answers after a step of PPO"),
        (["{same}"], "share no prompt that they answered differently"),
        (["--answers", "{run}/samples.csv"], "no such file or folder"),
        (["--answers", "{run}/samples.jsonl", "--models", "x", "y"], "from actor, actor_ema"),
        (["--answers", "{run}/bad.jsonl"], "bad.jsonl, row 1: column 'response' holds a value of"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    words: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = {
        "run": run_with(tmp_path / "runs" / "run", ["old"], ["new"]),
        "unfinished": run_with(tmp_path / "runs" / "unfinished", ["old"], []),
        "same": run_with(tmp_path / "runs" / "same", ["old"], ["old"]),
    }
    (runs["run"] / "bad.jsonl").write_text('{"prompt": "p", "response": null, "model": "m"}\n')
    before = sorted(tmp_path.rglob("*"))
    assert main([word.format(**runs) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert complaint in line
    assert sorted(tmp_path.rglob("*")) == before
