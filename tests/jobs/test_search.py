"""Searches: trials are runs, a killed search goes on, and no finished trial is repeated."""

import json
import math
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState, create_trial

from rlhf.base.errors import ConfigError
from rlhf.base.stored_files import METRICS
from rlhf.jobs.search import JOURNAL, RunningTrial, Searcher, _read_result
from rlhf.jobs.search_command import Dimension, PruneConfig, Search, StudyConfig, write_solutions
from tests.runs import ROOT, TINY_RUN, launch, new_cache, start

SFT = [word for word in TINY_RUN if not word.startswith(("ppo", "reward", "rollout", "sft.batch"))]
SEARCH = ["-m", "sweep=search_sft_lr", *SFT, "study.prune=null", "sft.warmup_steps=2"]


def study_of(folder: Path) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    return optuna.load_study(study_name=folder.name, storage=storage)


def results(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}


@pytest.mark.slow
def test_killed_search_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    words = [*SEARCH, "study.trials=3", "sft.batch_size=16", "sft.epochs=2"]
    environment = {"RLHF_CACHE": new_cache(tmp_path / "cache")}
    process = start(ROOT / "launch.py", *words, cwd=tmp_path, **environment)
    sweeps = tmp_path / "runs" / "sweeps"
    folders: list[Path] = []
    while not folders or len(results(folders[0])) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
        folders = list(sweeps.glob("*"))
    (folder,) = folders
    done = results(folder)
    states: list[TrialState] = []
    while states.count(TrialState.COMPLETE) < 2 or TrialState.RUNNING not in states:
        time.sleep(0.1)
        states = [trial.state for trial in study_of(folder).trials]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    began = {path.name for path in folder.glob("*/config.yaml")}
    states = [trial.state for trial in study_of(folder).trials]
    assert TrialState.RUNNING in states, "the study was killed while trials ran"

    again = launch(*words, cwd=tmp_path, **environment)
    assert again.returncode == 0, again.stderr
    assert {path: time for path, time in results(folder).items() if path in done} == done
    trials = study_of(folder).trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 3
    assert len(results(folder)) == 3
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 3, "a folder per trial"
    assert began <= {path.name for path in folder.glob("*/config.yaml")}
    best = yaml.safe_load((folder / "optimization_results.yaml").read_text())["solutions"]
    assert best[0]["best_evaluated_value"] == {
        "sft.perplexity_after": min(trial.value or 0 for trial in trials)
    }
    assert "sft.lr" in (folder / "sweep.html").read_text()


@pytest.mark.slow
def test_trial_that_fails_leaves_the_others(tmp_path: Path) -> None:
    words = [*SEARCH, "study.trials=4", "study.sampler=random", "sft.batch_size=16,100000"]
    run = launch(*words, cwd=tmp_path, RLHF_CACHE=new_cache(tmp_path / "cache"))
    assert run.returncode == 0, run.stderr
    (folder,) = (tmp_path / "runs" / "sweeps").iterdir()
    states = [trial.state for trial in study_of(folder).trials]
    sizes = [trial.params["sft.batch_size"] for trial in study_of(folder).trials]
    expected = {"16": TrialState.COMPLETE, "100000": TrialState.FAIL}
    assert set(sizes) == set(expected)
    assert states == [expected[size] for size in sizes]
    assert run.stdout.count("failed, exit code 2; its output is in") == sizes.count("100000")


def searcher(folder: Path, **study: Any) -> Searcher:
    search = Search(StudyConfig(**{"trials": 9, "maximize": ["ppo.x"]} | study), [], [], folder)
    return Searcher(search, None, "launch.py", [].append)  # type: ignore[arg-type]


def test_trial_of_a_search_that_was_killed_before_it_had_values_is_given_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = [Dimension("sft.lr", 1e-4, 1e-2), Dimension("seed", choices=("1", "2"))]
    search = Search(StudyConfig(trials=1, maximize=["sft.x"]), space, [], tmp_path)
    hardware: Any = SimpleNamespace(device=None, ranks_per_node=1)
    made = Searcher(search, hardware, "launch.py", [].append)
    killed = made._study.ask()
    killed.suggest_float("sft.lr", 1e-4, 1e-2)
    commands: list[list[str]] = []
    failed = SimpleNamespace(returncode=1, poll=lambda: 1)
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **_: commands.append(command) or failed
    )
    made.run()
    (trial,) = study_of(tmp_path).trials
    assert trial.state is TrialState.FAIL
    assert trial.params.keys() == {"sft.lr", "seed"}
    assert trial.params["sft.lr"] == killed.params["sft.lr"]
    assert f"seed={trial.params['seed']}" in commands[0]


def test_solutions_are_the_numbers_that_their_runs_had(tmp_path: Path) -> None:
    made = searcher(tmp_path, maximize=["ppo.gold_after"], minimize=["ppo.kl_after"])
    space = {
        "ppo.ppo_epochs": CategoricalDistribution(["1", "2", "null"]),
        "ppo.kl_ctl": FloatDistribution(1e-6, 1.0),
        "ppo.actor_lr": FloatDistribution(1e-6, 1.0),
    }
    for choice, kl in (("1", 2.0), ("2", 1.0), ("null", 1.0)):
        chosen = dict(zip(space, (choice, 0.123456789, 0.0000123456), strict=True))
        trial = create_trial(params=chosen, distributions=space, values=[0.0, kl])
        made._study.add_trial(trial)
    write_solutions(made._search, made._study.best_trials)
    content = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert (content["maximize"], content["minimize"]) == (["ppo.gold_after"], ["ppo.kl_after"])
    found = {each["trial"]: each["best_evaluated_params"] for each in content["solutions"]}
    numbers = {"ppo.kl_ctl": 0.1235, "ppo.actor_lr": 1.235e-5}
    assert found == {n: {"ppo.ppo_epochs": e, **numbers} for n, e in ((1, 2), (2, None))}


def running(made: Searcher, folder: Path) -> RunningTrial:
    growing = METRICS.follow(folder)
    return RunningTrial(made._study.ask(), 0, None, folder, growing)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("goal", "metric", "reported"),
    [
        ({"maximize": ["ppo.gold_after"]}, "ppo/eval_gold", [0.5, 0.7]),
        ({"maximize": ["ppo.gold_after"]}, "ppo/eval_kl", [-0.5, -0.7]),
        ({"maximize": [], "minimize": ["ppo.kl_after"]}, "ppo/eval_gold", [-0.5, -0.7]),
    ],
)
def test_pruning_knows_which_way_its_metric_is_better(
    goal: dict[str, Any], metric: str, reported: list[float], tmp_path: Path
) -> None:
    made = searcher(tmp_path, prune=PruneConfig(metric=metric), **goal)
    trial = running(made, tmp_path)
    for step, value in enumerate((0.5, 0.7), start=1):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"phase": "ppo", "step": step, metric: value}) + "\n")
        made._report_and_check_pruning(trial)
    assert list(made._study.trials[0].intermediate_values.values()) == reported


def test_search_that_runs_already_is_refused(tmp_path: Path) -> None:
    first = searcher(tmp_path)
    with pytest.raises(ConfigError, match="another process runs this search"):
        searcher(tmp_path)
    assert first is not None


@pytest.mark.slow
def test_hopeless_trial_ends_early(tmp_path: Path) -> None:
    words = [*SEARCH, "study.trials=1", "sft.batch_size=16", "sft.lr=choice(1e30)"]
    words.remove("study.prune=null")
    run = launch(*words, cwd=tmp_path, RLHF_CACHE=new_cache(tmp_path / "cache"))
    assert run.returncode == 0, run.stderr
    (folder,) = (tmp_path / "runs" / "sweeps").iterdir()
    assert [trial.state for trial in study_of(folder).trials] == [TrialState.PRUNED]
    assert run.stdout.count("pruned, ended early; its output is in") == 1
    assert len(list(folder.glob("*/alarms.jsonl"))) == 1


@pytest.mark.parametrize(("value", "is_hopeless"), [(0.9, True), (0.1, False)])
def test_trial_that_is_worse_than_the_median_report_and_should_prune(
    value: float, is_hopeless: bool, tmp_path: Path
) -> None:
    prune = PruneConfig(metric="sft/eval_loss", after_trials=2)
    made = searcher(tmp_path / "sweep", minimize=["sft.loss"], maximize=[], prune=prune)
    for _ in range(2):
        trial = made._study.ask()
        trial.report(0.5, 10)
        made._study.tell(trial, 0.5)
    (tmp_path / "metrics.jsonl").write_text(
        '{"phase": "sft", "step": 9, "sft/loss": 7}\n'
        f'{{"phase": "sft", "step": 10, "sft/eval_loss": {value}}}\n'
    )
    trial = running(made, tmp_path)
    for _ in range(2):  # a step is reported once
        assert made._report_and_check_pruning(trial) is is_hopeless


def test_a_trial_with_a_measure_that_is_not_finite_has_failed(tmp_path: Path) -> None:
    phases = {"sft": {"perplexity_after": None}}
    assert math.isnan(_read_result(phases, "sft.perplexity_after"))
    with pytest.raises(ConfigError, match=r"no result sft\.other; they have the phases sft"):
        _read_result(phases, "sft.other")
