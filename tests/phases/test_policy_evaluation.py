"""Held-out prompts are each counted once, and answered with the same random numbers each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config.choices import Phase
from rlhf.phases.context import RunContext
from rlhf.phases.policy_evaluation import (
    AnsweringPolicy,
    HeldOutPrompts,
    evaluate_policy,
    gold_scores,
    write_samples,
)
from rlhf.rollout.experience import Opinions, WholeSequences, collect
from rlhf.types import PromptBatch, Responses
from tests.phases.run_pieces import Compose, Notes, run_context


class Answers:
    """Ends every other response at once; notes the prompts and the random numbers."""

    def __init__(self) -> None:
        self.seen: dict[tuple[float, ...], str] = {}

    def generate(self, _: Any, prompts: PromptBatch) -> Responses:
        rows = list(zip(map(tuple, prompts.draws_BT.tolist()), prompts.texts, strict=True))
        self.seen |= dict(rows)
        tokens_B = prompts.attend_BP.sum(dim=1)
        ended_B = tokens_B % 2 == 0
        keep_BT = torch.ones(len(rows), 3, dtype=torch.bool)
        keep_BT[ended_B, 1:] = False
        return Responses(torch.full_like(keep_BT, 7, dtype=torch.long), keep_BT, ended_B)


def opinions(sequences: WholeSequences) -> Opinions:
    """Half a nat of KL on each token; the score is the number of tokens."""
    logprobs_BT = torch.full(sequences.keep_BT.shape, -1.0)
    scores_B = sequences.lengths_B.float()
    return Opinions(logprobs_BT, logprobs_BT - 0.5, torch.zeros_like(logprobs_BT), scores_B)


class LengthJudge:
    """A response is as good as its text is long."""

    def score(self, prompt: str, response: str, *, ended: bool) -> float:
        return len(response) + (100 if ended else 0) + 1000 * len(prompt)


@pytest.fixture
def made(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[RunContext, Notes]]:
    options = ["phase=ppo", "rollout.max_response_tokens=3", "rollout.max_prompt_tokens=200"]
    return lambda *more: run_context(compose, tmp_path, monkeypatch, *options, *more)


def held_out_of(context: RunContext) -> HeldOutPrompts:
    data = context.tokens(Phase.ppo, batch_size=1, key="k")
    return HeldOutPrompts(data.eval, context.part(Phase.ppo).eval)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2, 3, 10])
@pytest.mark.parametrize("num_prompts", [1, 2, 100])
def test_each_prompt_counts_once(
    made: Callable[..., tuple[RunContext, Notes]], micro: int, num_prompts: int
) -> None:
    context, _ = made()
    held_out, rollout = held_out_of(context), Answers()
    policy = AnsweringPolicy(None, rollout, opinions, micro)
    for _ in range(2):  # the second time with the same random numbers
        result = evaluate_policy(context, policy, held_out, num_prompts=num_prompts)
    ids = held_out.examples["ids"][:num_prompts]
    assert len(ids) == min(num_prompts, len(held_out.examples))
    lengths = [1 if len(row) % 2 == 0 else 3 for row in ids]
    count = len(ids)
    assert result.score == pytest.approx(
        sum(len(row) + n for row, n in zip(ids, lengths, strict=True)) / count
    )
    assert result.kl_to_reference == pytest.approx(0.5 * sum(lengths) / count)
    assert result.ended_share == pytest.approx(sum(n == 1 for n in lengths) / count)
    assert result.gold is None
    rows = held_out.examples["row"][:num_prompts]
    assert list(rollout.seen.values()) == [held_out.records[row].prompt for row in rows]


def test_gold_scores_are_those_of_the_texts(
    made: Callable[..., tuple[RunContext, Notes]],
) -> None:
    context, _ = made()
    context = replace(context, judge=LengthJudge())
    held_out = held_out_of(context)
    policy = AnsweringPolicy(None, Answers(), opinions, 2)
    result = evaluate_policy(context, policy, held_out, num_prompts=100)
    letters = len(context.tokenizer.decode([7]))
    prompts = [held_out.records[row].prompt for row in held_out.examples["row"]]
    golds = [
        letters * (1 if len(ids) % 2 == 0 else 3)
        + (100 if len(ids) % 2 == 0 else 0)
        + 1000 * len(p)
        for ids, p in zip(held_out.examples["ids"], prompts, strict=True)
    ]
    assert result.gold == pytest.approx(sum(golds) / len(golds))


def test_samples_are_the_first_responses(
    made: Callable[..., tuple[RunContext, Notes]],
) -> None:
    context, notes = made()
    held_out = held_out_of(context)
    ids, records = held_out.examples["ids"], held_out.records
    prompts = PromptBatch(
        torch.tensor([ids[0], ids[0]]),
        torch.ones(2, len(ids[0]), dtype=torch.bool),
        torch.zeros(2, 3),
        [records[0].prompt] * 2,
    )
    responses = Answers().generate(None, prompts)
    rollout = collect(opinions, prompts, responses, micro_batch_size=1)
    write_samples(context, 5, rollout, count=1)
    (sample,) = notes.samples
    assert (sample["phase"], sample["step"], sample["gold"]) == ("ppo", 5, None)
    assert (sample["prompt"], sample["score"]) == (records[0].prompt, rollout.scores_B[0])
    judged = replace(context, judge=LengthJudge())
    write_samples(judged, 6, rollout)
    assert [sample["gold"] for sample in notes.samples[1:]] == gold_scores(judged, rollout)
