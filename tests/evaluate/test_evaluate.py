"""A finished run is evaluated from its folders, and the figures are those that it had measured."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.data.splits import PhaseData
from rlhf.evaluate.__main__ import evaluate, main
from rlhf.evaluate.answer_rows import Evaluator, last_trained_policy
from rlhf.phases.shared.context import RunContext, phase_records, phase_tokens
from rlhf.phases.shared.policy_evaluation import HeldOutPrompts
from tests.documents import read_document
from tests.runs import ROOT, finished

SMALL_PPO = ["ppo.rollout_batch_size=16", "ppo.mini_batch_size=8", "ppo.eval_prompts=8"]
SMALL_PPO += ["rollout.max_response_tokens=8", "hardware.dtype=fp32"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    start = [f"from_run={tiny_run}", "phase=ppo"]
    return finished(folder, *start, "ppo.ema_beta=0.5", "ppo.eval_every=1", "ppo.actor_lr=0.01")


@pytest.fixture(scope="module")
def found(run: Path) -> dict[str, Any]:
    return evaluate(run, samples=2, temperatures=[0.5])


def result_of(run: Path, phase: str) -> dict[str, Any]:
    phases = json.loads((run / "result.json").read_text())["phases"]
    of_phase: dict[str, Any] = phases[phase]
    return of_phase


def test_figures_are_those_of_the_run(run: Path, found: dict[str, Any]) -> None:
    ppo = result_of(run, "ppo")
    lines = (run / "evaluation" / "answers.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for when, model in {"before": "sft", "after": "ppo", "after_ema": "ppo_ema"}.items():
        first = [
            r for r in rows if (r["model"], r["decoder"], r["sample"]) == (model, "sampled", 0)
        ]
        names = {"score": "score", "kl": "kl", "response_tokens": "tokens", "gold": "gold/gold"}
        for ours, name in (names | {"ended_share": "ended", "exact": "gold/exact"}).items():
            mean = sum(float(row[name]) for row in first) / len(first)
            assert mean == pytest.approx(ppo[f"{ours}_{when}"], abs=1e-5), (when, ours)
        greedy = found["models"][model]["decoders"]["greedy"]
        assert greedy["pass_at"]["1"] == pytest.approx(ppo[f"exact_greedy_{when}"])
    sft = found["models"]["sft"]["perplexity"]
    assert sft == pytest.approx(result_of(run, "sft")["perplexity_after"], rel=1e-5)
    reward = result_of(run, "reward")
    assert found["reward_model"]["accuracy"] == pytest.approx(reward["accuracy"])
    assert len(found["over_optimisation"]) == 3  # before, after the first step, after the last
    assert set(found["models"]["ppo"]["decoders"]) == {"sampled", "greedy", "temperature 0.5"}
    assert "Calibration of the reward model" not in (run / "report.html").read_text()


def test_best_of_two_is_the_accuracy_on_pairs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluator = Evaluator(run)
    examples = phase_tokens(evaluator.context, Phase.reward).eval
    records = phase_records(evaluator.context, Phase.reward).eval
    evaluator.close()
    pairs = [records[row] for row in examples["row"][: evaluator.config.reward.eval_examples]]
    rows = [
        {"prompt": each.prompt, "chosen": [each.chosen], "rejected": [each.rejected]}
        for each in pairs
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    capsys.readouterr()  # what loading printed
    assert main([str(run), "--json", "--prompts", "2", "--best-of", str(file)]) == 0
    out, said = capsys.readouterr()
    found = read_document("evaluate", out)
    assert found["best_of_k"]["all"]["prompts"] == found["reward_model"]["pairs"]
    assert found["best_of_k"]["all"]["accuracy"] == found["reward_model"]["accuracy"]
    assert found["best_of_k"]["all"]["chance"] == 0.5
    assert "best of k" in said


def test_the_command_and_the_script_of_the_page_compute_the_same_win_rate(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--json"]) == 0
    out, said = capsys.readouterr()
    assert "ppo_ema" in said
    assert "win rates" in said
    report = (run / "report.html").read_text()
    assert "Calibration of the reward model" in report
    assert "Scores, from the lowest to the highest" in report
    assert "answered by each model and decoder" in report
    again = json.loads((run / "evaluation" / "evaluation.json").read_text())
    assert read_document("evaluate", out) == again
    scripts = re.findall(r"```python\n(.*?)```", (ROOT / "docs/use.md").read_text(), re.S)
    (script,) = (each for each in scripts if "answers.jsonl" in each)
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=run / "evaluation",
        capture_output=True,
        text=True,
        check=True,
    )
    rate, low, high = map(float, re.findall(r"[\d.]+", ran.stdout))
    (pair,) = (w for w in again["win_rates"] if (w["model"], w["against"]) == ("ppo", "sft"))
    assert rate == pytest.approx(pair["rate"], abs=1e-3)
    assert [low, high] == pytest.approx(pair["ci"], abs=0.02)


def test_another_run_is_compared(run: Path, tmp_path: Path) -> None:
    start = ["phase=ppo", "model=pretrained", f"model.path={run / 'sft' / 'model'}"]
    words = [*start, "model@reward_model=gold", "ppo.steps=1", *SMALL_PPO]
    other = finished(tmp_path / "other", *words)
    found = evaluate(run, against=[other], num_prompts=2)
    assert list(found["models"])[-1] == "other/ppo"
    assert found["models"]["other/ppo"]["decoders"]["sampled"]["prompts"] == 2
    of_other = evaluate(other, num_prompts=2)["models"]
    assert list(of_other) == ["start", "ppo"], "the model before PPO too, although not of this run"
    assert of_other["start"]["decoders"]["sampled"]["kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not the directory of a run"),
        (["RUN", "--samples", "0"], "--samples 0: must be 1 or more"),
        (["RUN", "--temperature", "-1"], "--temperature -1.0: must be finite and above 0"),
        (["RUN", "--against", "nowhere"], "nowhere has no policy"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run) if word == "RUN" else word for word in arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_with_rewards_knows_what_is_right(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n}?", "completion": f" {n + random.Random(n).randint(0, 1)}", "answer": n}
        for n in range(120)
    ]
    file = tmp_path / "numbers.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    local = ["phase=pipeline_rule", "model@reward_model=gold", "data=local", f"data.path={file}"]
    part = "rewards.right={kind: number, columns: [answer]}"
    run = finished(tmp_path / "run", *local, part, "data.split=[1,0,1]", "sft.batch_size=8")
    found = evaluate(run, samples=2)
    decoders = found["models"]["ppo"]["decoders"]
    assert set(decoders["sampled"]["pass_at"]) == {"1", "2"}
    assert decoders["greedy"]["parts/right"] == decoders["greedy"]["pass_at"]["1"]
    assert "reward_model" not in found


@pytest.mark.parametrize(
    ("order", "held_out", "answered"),
    [
        ([Phase.sft, Phase.dpo], [], Phase.reward),
        ([Phase.sft, Phase.dpo], ["a record"], Phase.ppo),
        ([Phase.ppo], [], Phase.ppo),
    ],
)
def test_a_dpo_run_answers_the_prompts_of_its_own_evaluation(
    order: list[Phase], held_out: list[Any], answered: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where data.split gives PPO nothing, DPO answers the prompts of the reward phase."""
    context = SimpleNamespace(parts={Phase.ppo: PhaseData(train=[], eval=held_out)})
    evaluator = object.__new__(Evaluator)
    evaluator.context = cast(RunContext, context)
    evaluator.config = cast(RunConfig, SimpleNamespace(phase=SimpleNamespace(order=order)))
    monkeypatch.setattr(HeldOutPrompts, "from_phase", lambda _, phase: phase)
    assert evaluator.prompts == answered


def test_a_run_is_compared_by_the_policy_that_it_trained(tmp_path: Path) -> None:
    for place in ("sft/model", "ppo/actor", "ppo/actor_ema"):
        (tmp_path / place).mkdir(parents=True)
    assert last_trained_policy(tmp_path) == ("ppo", tmp_path / "ppo/actor")
