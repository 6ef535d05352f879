"""Alarms during training: each is raised by its own pattern, once, and by nothing healthy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhf.config.schema.run import AlarmName, AlarmsConfig
from rlhf.run.step_alarms import CONDITIONS, NEEDED, RULES, Alarm, AlarmRules, read_alarms
from rlhf.run.tracker import Tracker
from rlhf.run.trackers import FileTracker, StoppedByAlarmError, Trackers

HEALTHY = {
    "ppo/kl_per_token": [0.0, 0.01, *[0.05 * n for n in range(1, 6)] * 4],
    "ppo/kl_to_reference_k3": [0.0, *[0.3] * 20],
    "ppo/logprob_mismatch": [0.01] * 21,
    "ppo/rollout_sample_size": [0.2, 0.2, 0.9, *[0.5] * 18],
    "ppo/clipfrac": [0.0, 0.4, 0.4, *[0.05] * 18],
    "ppo/entropy": [2.0 * 0.93**n for n in range(21)],
    "ppo/response_tokens": [8.0, 9.0, 7.0, 30.0, 6.0, *[5.0] * 16],
    "ppo/ended_share": [0.9, 0.2, *[0.95] * 19],
    "ppo/same_response_share": [0.3, *[0.1] * 10, *[0.4] * 10],
    "ppo/explained_variance": [-3.0, -1.0, *[0.5] * 11, *[0.0] * 8],
    "ppo/critic_loss": [4.0, 0.5, 0.4, 20.0, *[0.1] * 17],
    "ppo/fallback_share": [0.0, 1.0, 1.0, *[0.05] * 18],
    "ppo/score_mean": [0.2, 0.3, 0.2, 0.3, 0.2, *[0.25] * 8, *[1.0] * 8],  # all right in the end
    "ppo/score_std": [0.4, 0.4, 0.0, 0.0, 0.4, *[0.4] * 8, *[0.0] * 8],
    "ppo/clipped_score_mean": [0.2, 0.3, 0.2, 0.3, 0.2, *[0.25] * 8, *[1.0] * 8],
    "ppo/clipped_score_std": [0.4, 0.4, 0.0, 0.0, 0.4, *[0.4] * 8, *[0.0] * 8],
    "ppo/equal_group_share": [0.4, 0.95, 0.95, 0.4, 0.4, *[0.6] * 8, *[1.0] * 8],
    "ppo/eval_score": [0.0, 0.5, 1.0, 1.2, 1.1],
    "ppo/eval_gold": [0.5, 0.6, 0.68, 0.65, 0.66],
}


def raised(series: dict[str, Sequence[float]], *muted: AlarmName) -> list[Alarm]:
    rules, found = AlarmRules(muted), []
    for step in range(max(map(len, series.values()))):
        values = {name: each[step] for name, each in series.items() if step < len(each)}
        found += rules.check("ppo", step, values)
    return found


def test_a_frozen_actor_raises_no_alarm_until_it_has_learned() -> None:
    rules, found = AlarmRules(), []
    for step in range(1, 70):
        rate = {} if step <= 50 else {"ppo/actor_learning_rate": 1e-5}
        found += rules.check("ppo", step, {"ppo/kl_to_reference_k3": 0.0, **rate})
    assert [(alarm.name, alarm.step) for alarm in found] == [("no_change", 61)]


def test_healthy_run_raises_none() -> None:
    assert raised(HEALTHY) == []
    noisy = {"ppo/explained_variance": [0.05] * 20, "ppo/clipped_score_std": [0.4] * 20}
    assert raised(HEALTHY | noisy) == [], "a critic that explains little helps"
    both = {"ppo/eval_score": [0.0, 0.9, 0.5], "ppo/eval_gold": [0.5, 0.7, 0.5]}
    assert raised(HEALTHY | both) == [], "gold that falls with the score is another matter"


@pytest.mark.parametrize(
    ("name", "series", "step"),
    [
        ("kl_runaway", {"ppo/kl_per_token": [0.1, 0.7, 0.7, 0.1, 0.7, 0.7, 0.7, 0.7]}, 6),
        ("reference_mismatch", {"ppo/kl_to_reference_k3": [0.02, 0.02]}, 0),
        ("rollout_mismatch", {"ppo/logprob_mismatch": [0.09, 0.01]}, 0),
        ("rollout_outliers", {"ppo/logprob_mismatch_share": [0.15, 0.25]}, 1),
        ("few_samples", {"ppo/rollout_sample_size": [0.9, 0.2, 0.29, 0.29]}, 3),
        ("clipping", {"ppo/clipfrac": [0.3] * 6}, 2),
        ("entropy_collapse", {"ppo/entropy": [*[2.0] * 5, 0.09, 0.09, 0.09]}, 7),
        ("length", {"ppo/response_tokens": [*[10.0] * 5, 21.0, 22.0, 25.0]}, 7),
        ("length", {"ppo/response_tokens": [*[10.0] * 5, 2.0, 2.0, 2.0]}, 7),
        ("few_end", {"ppo/ended_share": [*[0.9] * 5, 0.4, 0.4, 0.4]}, 7),
        ("duplicates", {"ppo/same_response_share": [*[0.1] * 5, 0.5, 0.5, 0.9]}, 7),
        (
            "critic_useless",
            {"ppo/explained_variance": [-0.1, *[0.02] * 19], "ppo/clipped_score_std": [0.4] * 21},
            14,
        ),
        ("fallbacks", {"ppo/fallback_share": [0.0, 0.3, 0.2, 0.2]}, 3),
        ("equal_scores", {"ppo/score_std": [0.0, 0.0, 1e-7, *[0.4] * 18]}, 2),
        ("equal_groups", {"ppo/equal_group_share": [0.95] * 9}, 2),
        ("blind_updates", {"ppo/clipped_score_std": [0.0, 1e-9, 0.0, 0.0]}, 3),
        (
            "no_change",
            {
                "ppo/kl_to_reference_k3": [0.0, *[3e-4] * 11],
                "ppo/actor_learning_rate": [1e-5] * 12,
            },
            10,
        ),
        (
            "score_against_gold",
            {"ppo/eval_score": [0.0, 0.4, 0.9, 0.9], "ppo/eval_gold": [0.6, 0.62, 0.58, 0.47]},
            3,
        ),
        ("not_finite", {"ppo/actor_loss": [0.1, math.nan]}, 1),
    ],
)
def test_each_alarm_has_its_own_pattern(
    name: str, series: dict[str, list[float]], step: int
) -> None:
    (alarm,) = raised(HEALTHY | series)
    assert (alarm.name, alarm.step, alarm.phase) == (name, step, "ppo")
    assert alarm.line.startswith(f"alarm {name}: {alarm.metric}=")
    assert raised(HEALTHY | series, AlarmName(name)) == []


def test_every_name_has_a_rule() -> None:
    assert {*RULES, AlarmName.not_finite} == set(AlarmName)
    assert {name for name, rule in RULES.items() if rule.above is None} == {*CONDITIONS}
    for rule in RULES.values():
        assert rule.advice.endswith(".")


class Listener(Tracker):
    """A tracker that remembers alarms."""

    def __init__(self) -> None:
        self.heard: list[Alarm] = []

    def alert(self, alarm: Alarm) -> None:
        self.heard.append(alarm)


def test_alarm_is_written_heard_and_printed_once_and_can_end_the_run(tmp_path: Path) -> None:
    listener, said = Listener(), list[str]()
    config = AlarmsConfig(stop=[AlarmName.not_finite], mute=[])
    made = Trackers([listener, FileTracker(tmp_path, [].append)], config, said.append, {})
    made.log("ppo", 0, {"ppo/kl_to_reference_k3": 0.02})
    with pytest.raises(StoppedByAlarmError, match=r"alarms\.stop has not_finite"):
        made.log("ppo", 1, {"ppo/actor_loss": math.nan})
    made.log("ppo", 2, {"ppo/actor_loss": math.nan})
    made.finish()
    mismatch, alarm = listener.heard
    assert mismatch.name == AlarmName.reference_mismatch
    last = (tmp_path / "alarms.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["value"] is None
    again = [each.line for each in read_alarms(tmp_path)]
    assert said == again == [mismatch.line, alarm.line]
    assert alarm.line.startswith("alarm not_finite: ppo/actor_loss=nan at ppo step 1. ")
    assert read_alarms(tmp_path / "elsewhere") == []


def test_the_norm_of_a_skipped_update_is_a_fault_only_if_it_lasts() -> None:
    rules = AlarmRules()
    overflow = {"ppo/actor_grad_norm": math.inf, "ppo/skipped_steps": 1.0}
    assert not any(rules.check("ppo", step, overflow) for step in range(20))
    assert rules.check("ppo", 20, overflow)
    (alarm,) = AlarmRules().check("ppo", 1, overflow | {"ppo/skipped_steps": 0.0})
    assert alarm.name == AlarmName.not_finite


def test_infinite_values_of_both_signs_do_not_end_a_run() -> None:
    rules = AlarmRules()
    for step, value in enumerate([math.inf, -math.inf, *[0.5] * 20]):
        rules.check("ppo", step, dict.fromkeys(NEEDED, value))
