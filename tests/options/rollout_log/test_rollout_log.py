"""Whole steps of rollouts: what is logged of all ranks, and what the report makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.base.ranks import Ranks
from rlhf.base.types import PromptBatch, Responses, Rollout, TermScores
from rlhf.config.freeze import to_run_config
from rlhf.options.rollout_log import report
from rlhf.phases.ppo.hooks import build_hooks
from rlhf.report.charts import RunFiles
from tests.conftest import Compose

Logged = list[tuple[str, str, int, list[dict[str, Any]]]]
KEEP_BT = torch.tensor([[True, True, True], [True, True, False]])
LOGPROBS_BT = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.5, 7.0]])
REFERENCE_BT = torch.tensor([[-1.5, -2.0, -3.5], [-1.25, -1.5, 9.0]])


class OneOfTwo(Ranks):
    """A rank beside another one, whose responses are the same."""

    def all_gather(self, value: Any) -> list[Any]:
        return [value, value]


def rollout() -> Rollout:
    nothing_BT = torch.zeros(2, 3)
    prompts = PromptBatch(torch.ones(2, 1), torch.ones(2, 1), nothing_BT, ["Hi?", "Bye?"])
    ids_BT = torch.tensor([[5, 6, 7], [8, 9, 0]])
    responses = Responses(ids_BT, KEEP_BT, torch.tensor([True, False]))
    parts = TermScores(torch.tensor([[0.5, 1.0], [0.25, 0.0]]), torch.zeros(2, 2).bool())
    return Rollout(
        prompts, responses, LOGPROBS_BT, REFERENCE_BT, nothing_BT, torch.tensor([1.5, 0.25]), None
    )._replace(parts=parts)


def log(compose: Compose, every: int, steps: int) -> Logged:
    """What a run of two ranks logs in its first steps."""
    logged: Logged = []
    words = [f"ppo.log_rollouts_every={every}", "phase=pipeline_rule", "model@reward_model=gold"]
    words += ["+rewards.right={kind: gold}", "+rewards.ends={kind: stop}"]
    config = to_run_config(compose(words))
    tracker = SimpleNamespace(append=lambda *given: logged.append(given))
    tokenizer = SimpleNamespace(decode=lambda ids_T, **_: " ".join(map(str, ids_T.tolist())))
    context = SimpleNamespace(ranks=OneOfTwo(), tracker=tracker, tokenizer=tokenizer)
    for hook in build_hooks(config):
        hook.prepare(Any, SimpleNamespace(context=context))  # type: ignore[arg-type]
        for done in range(steps):
            given = rollout()
            trainer: Any = SimpleNamespace(steps_done=done)
            assert hook.prepare_rollout(trainer, given) == (given, {})
    return logged


def test_responses_of_all_ranks_are_logged_when_due(compose: Compose) -> None:
    assert log(compose, 0, 4) == []
    logged = log(compose, 2, 5)
    assert [each[:3] for each in logged] == [("rollouts.jsonl", "ppo", step) for step in (2, 4)]
    lines = logged[0][3]
    assert lines[:2] == lines[2:], "of both ranks, in their order"
    assert lines[:2] == [
        {"prompt": "Hi?", "response": "5 6 7", "ended": True, "score": 1.5, "kl": 1.0}
        | {"tokens": 3.0, "part right": 0.5, "part ends": 1.0},
        {"prompt": "Bye?", "response": "8 9", "ended": False, "score": 0.25, "kl": 0.25}
        | {"tokens": 2.0, "part right": 0.25, "part ends": 0.0},
    ]


@pytest.mark.parametrize("has_log", [True, False])
def test_report_has_their_spread_and_their_texts(tmp_path: Path, *, has_log: bool) -> None:
    rows = [
        {"phase": "ppo", "step": step, "prompt": "p", "response": "r", "ended": True}
        | {"score": float(step * number), "kl": None, "tokens": 2.0}
        for step in (1, 2)
        for number in range(11)
    ]
    if has_log:
        (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunFiles(tmp_path, {}, {}, [], [], None)
    (section,) = report.rollout_sections(run)
    if not has_log:
        assert not any(section.charts)
        assert not section.answers["responses that PPO learned from"]
        return
    assert [*section.answers.values()] == [rows]
    scores, lengths = (chart.data["lines"][0] for chart in section.charts if chart)
    assert (scores["x"], scores["y"]) == ([1, 2], [5, 10])
    assert (scores["low"], scores["high"]) == ([1, 2], [9, 18]), "eight tenths between"
    assert lengths["y"] == [2, 2]
