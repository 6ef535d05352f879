"""The verdict and the tiles of a run, from its result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.report.charts import RunFiles
from rlhf.report.comparison import measure_meanings
from rlhf.report.first_screen import build_tiles, read_verdict
from rlhf.report.page import unframe_prompt

REWARD = {"accuracy": 0.75, "accuracy_ci": [0.7, 0.8], "seconds": 1.0}
SFT = {"perplexity_before": 400.0, "perplexity_after": 2.5, "seconds": 1.0}
PPO = {
    **{
        f"{name}_{when}": 2.0
        for name in ("score", "response_tokens")
        for when in ("before", "after")
    },
    **{"gold_before": 0.25, "gold_after": 0.5, "gold_gain_ci": [0.2, 0.3], "kl_to_reference": 0.5},
    "ended_share_after": 0.75,
}
GAIN = "95 % interval of the gain"
TIME = ("time", "1:30:00", "1.5 times the planned 1:00:00")


@pytest.mark.parametrize(
    ("phases", "told", "tiles"),
    [
        (
            {"sft": SFT, "reward": REWARD, "ppo": PPO},
            f"better: gold score 0.250 → 0.500 ({GAIN} +0.200 to +0.300; one seed)",
            [
                ("gold score", "0.500", "right answers, 0 to 1; 3 held-out"),
                ("score", "2.000", "mean of what PPO maximises, so no proof of quality"),
                ("KL, nats", "0.5", "0.25 per token, doubtful above 0.3"),
                ("tokens of an answer", "2", "mean; 75% of the answers ended by themselves"),
            ],
        ),
        (
            {"sft": SFT, "reward": REWARD},
            "objective 0.500, held-out accuracy of the reward model",
            [
                ("pairs ranked correctly", "75.0%", "95 % interval 70.0% to 80.0%; chance is 50 %"),
            ],
        ),
        (
            {"sft": SFT},
            "objective 0.500, minus the held-out perplexity after SFT",
            [("perplexity", "2.5", "of held-out text: lower is better")],
        ),
    ],
)
def test_tiles_and_verdict_are_of_the_last_phase(
    tmp_path: Path, phases: dict[str, Any], told: str, tiles: list[tuple[str, str, str]]
) -> None:
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo" / "held_out.json").write_text(json.dumps({"before": {"score": [1.0] * 3}}))
    result = {"objective": 0.5, "phases": phases, "measured": {"hours": 1.5}}
    run = RunFiles(tmp_path, {}, {}, [], [], result | {"planned": {"hours": 1.0}})
    verdict = read_verdict(run)
    assert verdict.text == f"{told}; no reason found to doubt it"
    assert not verdict.is_doubtful
    found = [(tile.label, tile.after, tile.note) for tile in build_tiles(run)]
    for shown, expected in zip(found, [*tiles, TIME], strict=True):
        assert shown[:2] == expected[:2]
        assert expected[2] in shown[2]
    unplanned = run._replace(result=result | {"planned": {"hours": None}})
    assert [*build_tiles(unplanned)][-1].note == ""


def test_prompts_that_all_keep_their_value_tell_nothing(tmp_path: Path) -> None:
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo" / "held_out.json").write_text(json.dumps({"before": {"score": [1.0] * 11}}))
    exact = {"exact_before": 0.0, "exact_after": 0.0, "exact_gain_ci": [0.0, 0.0]}
    result = {"objective": 0.5, "phases": {"ppo": PPO | exact}}
    verdict = read_verdict(RunFiles(tmp_path, {}, {}, [], [], result))
    told = "exactly right 0.0% → 0.0% (11 held-out prompts are too few to measure it)"
    assert verdict.text == f"no change for any prompt: {told}; 1 reason to doubt it"
    assert verdict.is_doubtful


def test_a_proven_gain_is_doubtful_if_there_is_a_reason() -> None:
    phases = {"ppo": PPO | {"ended_share_after": 0.25}}
    verdict = read_verdict(RunFiles(Path(), {}, {}, [], [], {"objective": 0.5, "phases": phases}))
    assert verdict.text.endswith("; 1 reason to doubt it")
    assert verdict.is_doubtful


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("\n\nHuman: Hi.\nYou?\n\nAssistant:", "Hi.\nYou?"),
        ("Human: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:",) * 2,
        (" 2 + 2 = ", "2 + 2 ="),
    ],
)
def test_a_single_question_is_shown_without_its_frame(prompt: str, shown: str) -> None:
    assert unframe_prompt(prompt) == shown


def test_the_gold_score_means_the_same_with_any_reward(tmp_path: Path) -> None:
    gold = {"sft": {}, "ppo": {"gold_after": 0.5}}
    assert measure_meanings(tmp_path, {}, gold)["objective"] == "held-out gold score after PPO"
    assert ", by reward model" in measure_meanings(tmp_path, {}, {"ppo": {}})["objective"]
