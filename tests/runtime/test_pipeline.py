"""The whole pipeline, run as a user runs it."""

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.models.tokenizers import load_tokenizer
from rlhf.report.next_commands import suggest_commands
from tests.runs import ROOT, children, finished, metrics, python, wait_for
from tests.runtime.test_resume import is_there, start_run

pytestmark = pytest.mark.slow

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
SNIPPETS = [
    snippet
    for page in PAGES
    for snippet in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    if "PPOTrainer" in snippet  # test_docs.py runs the tracker of docs/watching.md
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a new interpreter, as the user's is; what others repeat of it is forked."""
    folder = tmp_path_factory.mktemp("runs")
    return finished(folder / "run", "plan=check", popen=subprocess.Popen)


def test_result_says_what_every_phase_reached(run_dir: Path) -> None:
    result = json.loads((run_dir / "result.json").read_text())
    sft, reward, ppo = (result["phases"][name] for name in ("sft", "reward", "ppo"))
    assert sft["perplexity_after"] < sft["perplexity_before"]
    low, high = reward["accuracy_ci"]
    assert 0 <= low <= reward["accuracy"] <= high <= 1
    assert 0.75 < reward["best_possible_accuracy"] < 0.99
    assert result["objective"] == ppo["gold_after"]
    assert {"score_before", "score_after", "gold_before", "kl_to_reference"} <= ppo.keys()
    assert 0 < ppo["peak_memory_gib"] < 3
    assert {"rlhf", "torch", "deepspeed", "transformers", "python"} == result["versions"].keys()


def test_metrics_of_every_step_are_there(run_dir: Path) -> None:
    lines = metrics(run_dir)
    steps = {p: [line["step"] for line in lines if line["phase"] == p] for p in ("reward", "ppo")}
    assert steps["ppo"] == [0, 1, 2, 2], "evaluated before the first and after the last step"
    assert steps["reward"][0] == 1
    before, first, _, after = lines[-4:]
    assert first["ppo/kl_to_reference"] == 0, "policy and reference start equal"
    assert first["ppo/actor_grad_norm"] > 0
    assert {"ppo/eval_score", "ppo/eval_gold"} <= before.keys() & after.keys()
    every_line = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert every_line[-2]["time/generate_seconds"] > 0
    assert every_line[-2]["speed/tokens_per_second"] > 0


def test_samples_are_judged(run_dir: Path) -> None:
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {0, 1, 2}
    for sample in samples:
        assert sample["prompt"].startswith("\n\nHuman: ")
        assert 0 <= sample["gold"] <= 1
        assert set(sample["gold_parts"]) == {"exact", "correct", "polite", "stops"}
        assert sample["ended"] in (True, False)


def test_plain_transformers_loads_the_models(run_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    for name in ("sft/model", "ppo/actor"):
        folder = run_dir / name
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        ids = tokenizer("\n\nHuman: hi\n\nAssistant:", return_tensors="pt").input_ids
        answer = model.generate(ids, max_new_tokens=4, do_sample=False)
        assert answer.shape[1] > ids.shape[1]
    for name in ("reward/model", "ppo/critic"):
        model = AutoModelForSequenceClassification.from_pretrained(run_dir / name)
        assert model(ids).logits.shape == (1, 1)
    assert not [p for p in run_dir.rglob("*") if p.suffix in {".bin", ".pt", ".pkl", ".building"}]


def test_the_calls_that_are_printed_and_on_the_model_card_work(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = suggest_commands(run_dir)
    start = lines.index("  # use the model, in Python") + 1
    card = (run_dir / "ppo" / "actor" / "README.md").read_text()
    (on_card,) = re.findall(r"```python\n(.*?\n)```\n", card, re.DOTALL)
    monkeypatch.chdir(run_dir)  # the card names the folder in the run
    for call in ("\n".join(line.strip() for line in lines[start : start + 3]), on_card):
        assert '{"role": "user", "content": "' in call
        exec(call, {})
        assert capsys.readouterr().out.endswith("\n")
    tokenizer = load_tokenizer(run_dir / "ppo" / "actor", key="actor")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Repeat: fig."}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "\n\nHuman: Repeat: fig.\n\nAssistant:"
    assert "```python" not in (run_dir / "ppo" / "critic" / "README.md").read_text()


def test_the_same_command_gives_the_same_metrics(run_dir: Path, tiny_run: Path) -> None:
    assert metrics(tiny_run) == metrics(run_dir)


@pytest.mark.soak
def test_the_same_command_with_rollout_hf_gives_the_same_metrics(tmp_path: Path) -> None:
    runs = [finished(tmp_path / name, "rollout=hf") for name in ("one", "again")]
    assert metrics(runs[0]) == metrics(runs[1])


def test_ctrl_c_ends_both_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_run(run, "phase=sft", "sft.epochs=9999", "hardware.ranks_per_node=2")
    started = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert f"interrupted; rlhf resume={run} continues the run" in errors
    wait_for(lambda: not any(map(is_there, started)), seconds=10)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_adopts_a_saved_run_through_the_python_interface(
    snippet: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/latest").symlink_to(run_dir)
    names: dict[str, Any] = {}
    exec(snippet, names)
    stats = names["stats"]
    assert stats.metrics["ppo/actor_loss"] == stats.actor_loss
    assert stats.critic_loss > 0
    assert stats.metrics["ppo/kl_to_reference"] != 0, "the actor learned in the steps before"
    assert torch.isfinite(names["rollout"].scores_B).all()


def test_a_run_is_taken_apart_by_its_judge(run_dir: Path, tmp_path: Path) -> None:
    """benchmarks/judge_run.py: its tables, from the models that the run left."""
    script, values = ROOT / "benchmarks" / "judge_run.py", tmp_path / "values.json"
    words = (script, run_dir, f"--json={values}")
    more = python(*words, "--prompts=1000", cwd=tmp_path)
    assert (more.returncode, "--prompts 1000: " in more.stderr) == (1, True)
    run = python(*words, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    (tables,) = json.loads(values.read_text()).values()
    parts, skills, pairs, best = tables.values()
    assert parts["SFT, T=1, style repaired"]["polite"] == 1.0
    assert parts["SFT, T=1"]["exactly right"] == skills["SFT, T=1"]["all"]
    assert 0 <= pairs["one wrong"]["all"] <= 1
    scores = [best[f"best of {n}"]["score"] for n in (1, 2, 4, 8, 16)]
    assert scores == sorted(scores)  # the first n of the same answers
    assert scores[-1] > scores[0]
    assert best["best of 1"]["KL, nats"] == 0
    assert 0 < best["best of 16"]["KL, nats"] < best["best of 16"]["KL at most"]
    assert 1 <= best["best of n at PPO's KL"]["n"] <= 64
    assert "| PPO, greedy |" in run.stdout
