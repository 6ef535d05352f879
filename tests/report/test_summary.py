"""What is printed at the end of a run."""

from __future__ import annotations

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from rlhf.report.next_commands import suggest_commands
from rlhf.report.summary import (
    answers_side_by_side,
    list_files_of_run,
    print_summary,
    rank_by_change,
    summary_blocks,
)
from rlhf.run.console import Console

PAIRS = {  # measures before and after PPO
    "score": (0.12, 1.83),
    "gold": (0.31, 0.871234),
    "exact": (0.25, 0.75),
    "exact_greedy": (0.7, 0.8),
    "gold_parts": ({"correct": 0.3, "polite": 0.4}, {"correct": 0.9, "polite": 1.0}),
    "response_tokens": (11.0, 7.5),
    "ended_share": (0.5, 1.0),
    "corpus_perplexity": (12.5, 13.25),
}
RESULT: dict[str, Any] = {
    "objective": 0.871234,
    "phases": {
        "sft": {"perplexity_before": 1023.3, "perplexity_after": 4.3121, "seconds": 12.3},
        "reward": {
            "accuracy": 0.861,
            "accuracy_ci": [0.841, 0.879],
            "best_possible_accuracy": 0.902,
            "minimal_pairs": {"one_item_wrong": 0.913},
            "seconds": 8.1,
        },
        "ppo": {f"{name}_before": before for name, (before, _) in PAIRS.items()}
        | {f"{name}_after": after for name, (_, after) in PAIRS.items()}
        | {"gold_after_ema": 0.86, "corpus_perplexity_after_ema": 13.1}
        | {"kl_to_reference": 1.21, "seconds": 3783.2},
        "dpo": {
            "accuracy": 0.7,
            "accuracy_ci": [0.65, 0.748],
            "gold_before": 0.31,
            "gold_after": 0.5,
            "kl_to_reference": 2.5,
            "seconds": 60.0,
        },
    },
    "planned": {"hours": 1.0, "memory_gib": 1.25},
    "measured": {"hours": 3910 / 3600, "memory_gib": 1.31},
    "versions": {"torch": "2.13.0", "deepspeed": "0.19.8"},
}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory as seen from two levels above it."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "mine"
    for folder in ("sft/model", "reward/model", "ppo/actor", "ppo/critic"):
        (path / folder).mkdir(parents=True)
    (path / "metrics.jsonl").touch()
    (path / "config.yaml").write_text("seed: 1\nppo: {kl_ctl: 0.3}\n")
    return path


def printed(result: dict[str, Any], run_dir: Path) -> list[str]:
    """The words of each line, one space apart."""
    file = StringIO()
    console = Console(file=file, force_terminal=False, width=80)
    print_summary(console, result, run_dir, "better: 0.3 → 0.9")
    return [" ".join(line.split()) for line in file.getvalue().splitlines()]


def test_all_measures_of_a_whole_run(run_dir: Path) -> None:
    lines = [line for line in printed(RESULT, run_dir) if line]
    assert lines[:2] == [
        "objective 0.871: held-out gold score after DPO",
        "phase measure before after time",
    ]
    assert lines[3:30] == [
        "sft held-out perplexity 1,023.300 4.312 0:00:12",
        "reward held-out accuracy 0.861 0:00:08",
        "95 % interval 0.841-0.879",
        "best possible 0.902",
        "one item wrong 0.913",
        "ppo exactly right 0.250 0.750 1:03:03",
        "exactly right, greedy 0.700 0.800",
        "held-out gold score 0.310 0.871",
        "averaged actor 0.860",
        "correct 0.300 0.900",
        "polite 0.400 1.000",
        "response tokens 11.000 7.500",
        "share that ended 0.500 1.000",
        "corpus perplexity 12.500 13.250",
        "averaged actor 13.100",
        "KL to reference, nats 1.210",
        "held-out score 0.120 1.830",
        "dpo held-out accuracy 0.700 0:01:00",
        "95 % interval 0.650-0.748",
        "held-out gold score 0.310 0.500",
        "KL to reference, nats 2.500",
        "run time 1:05:10",
        "planned 1:00:00",
        "peak memory, GiB 1.310",
        "planned 1.250",
        "torch 2.13.0, deepspeed 0.19.8",
        "Files of this run",
    ]


@pytest.mark.parametrize(
    ("last", "measures", "name"),
    [
        ("sft", {}, "minus the held-out perplexity after SFT"),
        ("reward", {}, "held-out accuracy of the reward model"),
        ("ppo", {}, "held-out gold score after PPO"),
        (
            "ppo",
            {"gold_before": None, "gold_after": None},
            "held-out score after PPO, by the reward",
        ),
        (None, {}, "of no phase"),
    ],
)
def test_the_objective_is_named(
    last: str | None, measures: dict[str, Any], name: str, run_dir: Path
) -> None:
    names = [None, "sft", "reward", "ppo"]
    phases = {key: RESULT["phases"][key] for key in names[1 : names.index(last) + 1]}
    if last is not None:
        phases[last] = {k: value for k, value in phases[last].items() if k not in measures}
    lines = printed(RESULT | {"phases": phases}, run_dir)
    assert " ".join(lines[1:3]).startswith(f"objective 0.871: {name}")


def test_answers_to_the_same_prompts_stand_side_by_side(run_dir: Path) -> None:
    prompts = [f"\n\nHuman: {number}?\n\nAssistant:" for number in range(4)]
    samples = [
        {"phase": "ppo", "step": step, "prompt": prompt, "ended": step > 0}
        | {"response": f" {step} to {prompt[9]}"}
        for step in (0, 10, 20)
        for prompt in prompts
    ]
    samples += [each | {"model": "actor_ema", "response": "average"} for each in samples[-4:]]
    (run_dir / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)))
    shown = (
        "  Human: {0}? Assistant:",
        "    before 0 to {0} (never ended)",
        "    after  20 to {0}",
    )
    assert answers_side_by_side(run_dir)[1:] == [
        line.format(number) for number in range(3) for line in shown
    ]
    (run_dir / "samples.jsonl").write_text(json.dumps(samples[0]))
    assert answers_side_by_side(run_dir) == []
    lines = [sample | {"response": "a\u2028b"} for sample in samples]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (run_dir / "samples.jsonl").write_text(text)
    assert "a b" in answers_side_by_side(run_dir)[2], "JSON may hold U+2028 as it is"


def test_the_verdict_the_doubts_and_what_to_type_come_last(run_dir: Path) -> None:
    """On the last screen: the remedy of the first doubt is the first change to type."""
    phases = RESULT["phases"] | {"reward": RESULT["phases"]["reward"] | {"accuracy_ci": [0.4, 0.6]}}
    (run_dir / "reward/result.json").write_text(json.dumps(phases["reward"]))
    (run_dir / "config.yaml").write_text("seed: 1\nppo: {kl_ctl: 0.3}\nreward: {epochs: 1}\n")
    lines = printed(RESULT | {"phases": phases}, run_dir)
    order = ["Files of this run", "better: 0.3 → 0.9", "Reasons to doubt this run"]
    order += ["What to type next", "# the same run, with twice as many passes over the pairs"]
    places = [lines.index(line) for line in order]
    assert places == sorted(places)
    assert lines[places[-1] + 1] == "rlhf reward.epochs=2"
    assert "includes chance" in lines[places[2] + 1]


def test_of_answers_with_equal_scores_those_that_have_changed_come_first() -> None:
    same, other = (({"response": "a"}, {"response": last}) for last in "ab")
    higher = ({"response": "a", "gold": 0.0}, {"response": "a", "gold": 1.0})
    assert rank_by_change([same, other]).pairs == [other, same]
    pairs = [tuple(each | {"gold": 0.5} for each in pair) for pair in (same, other)]
    assert rank_by_change([*pairs, higher]).pairs == [higher, pairs[1], pairs[0]]


def test_what_is_not_known_is_not_shown(run_dir: Path) -> None:
    optional = ("gold", "corpus", "exact")
    ppo = RESULT["phases"]["ppo"].items()
    known = {key: value for key, value in ppo if not key.startswith(optional)}
    reward = RESULT["phases"]["reward"].copy()
    del reward["best_possible_accuracy"], reward["minimal_pairs"]
    text = "\n".join(printed(RESULT | {"phases": {"reward": reward, "ppo": known}}, run_dir))
    assert "held-out score" in text
    assert not any(word in text for word in (*optional, "best possible", "averaged"))


def test_only_what_is_there_is_listed_as_one_would_type_it(run_dir: Path) -> None:
    assert [line.split() for line in list_files_of_run(run_dir)[1:]] == [
        ["SFT", "model", "runs/mine/sft/model"],
        ["reward", "model", "runs/mine/reward/model"],
        ["actor", "runs/mine/ppo/actor"],
        ["critic", "runs/mine/ppo/critic"],
        ["metrics", "runs/mine/metrics.jsonl"],
    ]


def test_the_next_commands_name_this_run(run_dir: Path) -> None:
    lines = [line.strip() for line in suggest_commands(run_dir)]
    assert 'model = pipeline("text-generation", "runs/mine/ppo/actor")' in lines
    assert 'print(model("Your prompt")[0]["generated_text"])' in lines
    assert "rlhf chat runs/mine" in lines
    assert "rlhf evaluate runs/mine" in lines
    assert "rlhf ppo.kl_ctl=0.6" in lines
    assert "rlhf data=local data.path=FILE" in lines
    assert not any("wandb" in line for line in lines)


@pytest.mark.parametrize(
    ("score", "gain", "change"),
    [
        ([-0.5, 0.6], [-0.1, 0.2], "ppo.steps=112"),
        ([-0.5, 0.6], [0.0, 0.0], "ppo.steps=112"),
        ([0.5, 0.6], [-0.1, 0.2], "ppo.kl_ctl=0.6"),
        ([0.5, 0.6], [0.1, 0.2], "ppo.kl_ctl=0.6"),
        ([0.5, 0.6], None, "ppo.kl_ctl=0.6"),
    ],
)
def test_a_run_that_gained_nothing_goes_on_unless_it_exploits_its_reward(
    run_dir: Path, score: list[float], gain: list[float] | None, change: str
) -> None:
    result = {"steps": 56, "score_before": 1, "score_after": 2, "score_gain_ci": score}
    result |= {"kl_to_reference": 1.0}
    result |= {"gold_before": 0.5, "gold_after": 0.5, "gold_gain_ci": gain} if gain else {}
    (run_dir / "ppo/result.json").write_text(json.dumps(result))
    lines = [line.strip() for line in suggest_commands(run_dir)]
    assert [line for line in lines if "ppo." in line] == [f"rlhf {change}"]


def test_more_steps_are_not_advised_to_a_run_whose_answers_repeat(run_dir: Path) -> None:
    result = {"steps": 56, "score_before": 1, "score_after": 2, "score_gain_ci": [-0.5, 0.6]}
    result |= {"kl_to_reference": 1.0}
    (run_dir / "ppo/result.json").write_text(json.dumps(result))
    alarm = {"phase": "ppo", "step": 3, "name": "duplicates", "metric": "ppo/same_response_share"}
    text = json.dumps(alarm | {"value": 0.9, "advice": "Raise it."})
    (run_dir / "alarms.jsonl").write_text(text + "\n")
    assert "  rlhf ppo.kl_ctl=0.6" in suggest_commands(run_dir)


@pytest.mark.parametrize("columns", ["[]", "[answer]"])
def test_rewards_that_read_columns_stay_with_their_data(columns: str, run_dir: Path) -> None:
    rewards = f"rewards: {{exact: {{kind: match, columns: {columns}}}}}"
    (run_dir / "config.yaml").write_text(f"seed: 1\nppo: {{kl_ctl: 0.3}}\n{rewards}\n")
    said = "\n".join(suggest_commands(run_dir))
    assert ("learn from your own examples" in said) == (columns == "[]")


def test_nothing_to_type_has_no_heading(run_dir: Path) -> None:
    """A reward model alone on data of the user."""
    (run_dir / "config.yaml").write_text("seed: 1\nppo: {kl_ctl: 0.3}\ndata: {source: local}\n")
    for name in ("ppo", "sft"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    assert suggest_commands(run_dir) == []


def test_the_next_commands_keep_what_was_typed(run_dir: Path) -> None:
    typed = "experiment=smoke data=hh data.size=9 'ppo.kl_ctl=0.3' 'name=my run' run_dir=runs/mine"
    (run_dir / "command.txt").write_text(f"python launch.py {typed}\n")
    lines = [line.strip() for line in suggest_commands(run_dir)]
    same = "rlhf experiment=smoke"
    assert f"{same} data=hh data.size=9 'name=my run' ppo.kl_ctl=0.6" in lines
    assert f"{same} ppo.kl_ctl=0.3 'name=my run' data=local data.path=FILE" in lines


def test_a_run_on_own_data_is_offered_no_other_data(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("seed: 1\nppo: {kl_ctl: 0.3}\ndata: {source: local}\n")
    typed = "data=local data.path=my.jsonl data.split=[4,4,2] data.template=chat"
    (run_dir / "command.txt").write_text(f"python launch.py {typed}\n")
    lines = [line.strip() for line in suggest_commands(run_dir)]
    typed = typed.replace("data.split=[4,4,2]", "'data.split=[4,4,2]'")
    assert f"rlhf {typed} ppo.kl_ctl=0.6" in lines
    assert not any("data.path=FILE" in line or "your own examples" in line for line in lines)


def test_the_model_is_asked_a_question_of_the_run(run_dir: Path) -> None:
    prompts = ["\n\nHuman: a\n\nAssistant: b\n\nHuman: and?\n\nAssistant:", "x" * 200]
    prompts.append("\n\nHuman: two words\n\nAssistant:")
    line = {"phase": "ppo", "step": 0, "response": ""}
    samples = [json.dumps(line | {"prompt": prompt}) for prompt in prompts]
    (run_dir / "samples.jsonl").write_text("\n".join(samples) + "\n")
    (run_dir / "ppo/actor/chat_template.jinja").touch()
    asked = '[{"role": "user", "content": "two words"}]'
    call = f'  print(model({asked})[0]["generated_text"][-1]["content"])'
    assert call in suggest_commands(run_dir)


def test_what_dpo_and_wandb_made_is_listed_and_offered(run_dir: Path) -> None:
    (run_dir / "ppo/actor").rmdir()
    for folder in ("dpo/actor", "wandb/offline-run-1-abc"):
        (run_dir / folder).mkdir(parents=True)
    assert "  policy of DPO    runs/mine/dpo/actor" in list_files_of_run(run_dir)
    lines = suggest_commands(run_dir)
    assert any("runs/mine/dpo/actor" in line for line in lines)
    assert "  wandb sync runs/mine/wandb/offline-run-*" in lines


def test_phase_that_another_run_trained_is_called_reused() -> None:
    phases = RESULT["phases"] | {"sft": RESULT["phases"]["sft"] | {"reused_from": "runs/a"}}
    durations = {part.name: part.duration for part in summary_blocks(RESULT | {"phases": phases})}
    assert durations["sft"] == "reused"
    assert durations["reward"] == "0:00:08"
