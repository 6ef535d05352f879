"""Held-out prompts are each counted once, and answered with the same random numbers each time."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf.base.types import PromptBatch, Responses, Rollout, TokenTargets
from rlhf.config.choices import Phase
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.policy_evaluation import (
    AnsweringPolicy,
    HeldOutPrompts,
    evaluate_policy,
    sample_answers,
)
from rlhf.phases.shared.scoring import ModelOutputs, WholeSequences
from tests.phases.run_pieces import Make


class Answers:
    """Ends every other response at once; notes the prompts and the random numbers."""

    def __init__(self) -> None:
        self.seen: dict[tuple[float, ...], str] = {}
        self.continues: list[bool] = []

    def generate(self, _: Any, prompts: PromptBatch) -> Responses:
        self.continues.append(prompts.keeps_weights)
        rows = list(zip(map(tuple, prompts.draws_BT.tolist()), prompts.texts, strict=True))
        self.seen |= dict(rows)
        tokens_B = prompts.attend_BP.sum(dim=1)
        ended_B = tokens_B % 2 == 0
        keep_BT = torch.ones(len(rows), 3, dtype=torch.bool)
        keep_BT[ended_B, 1:] = False
        return Responses(torch.full_like(keep_BT, 7, dtype=torch.long), keep_BT, ended_B)


class FixedModels:
    rewards = None

    def score(self, sequences: WholeSequences, *, with_policy: bool = True) -> ModelOutputs:
        """Half a nat of KL on each token; the score is the number of tokens."""
        logprobs_BT = torch.full(sequences.keep_BT.shape, -1.0)
        scores_B = sequences.lengths_B.float()
        zeros_BT = torch.zeros_like(logprobs_BT)
        return ModelOutputs(logprobs_BT, logprobs_BT - 0.5, zeros_BT, zeros_BT[:, 0], scores_B)


class LengthJudge:
    """A response is as good as its text is long, and right if it ended."""

    def rate(self, prompt: str, response: str, *, ended: bool) -> dict[str, float]:
        return {
            "gold": len(response) + (100 if ended else 0) + 1000 * len(prompt),
            "exact": float(ended),
            "correct": 0.5,
        }


class NoAnswers:
    """A backend whose responses never end."""

    def generate(self, _: Any, prompts: PromptBatch) -> Responses:
        keep_BT = torch.ones(len(prompts.texts), 3, dtype=torch.bool)
        ended_B = torch.zeros(len(prompts.texts), dtype=torch.bool)
        return Responses(torch.full_like(keep_BT, 7, dtype=torch.long), keep_BT, ended_B)


SHORT = ["phase=ppo", "rollout.max_response_tokens=3", "rollout.max_prompt_tokens=200"]


def held_out_of(context: RunContext) -> HeldOutPrompts:
    return HeldOutPrompts.from_phase(context, Phase.ppo)


@pytest.mark.parametrize(("num_prompts", "micro"), [(1, 2), (100, 1), (100, 3)])
def test_each_prompt_counts_once(made: Make, micro: int, num_prompts: int) -> None:
    context, _ = made()
    held_out, rollout = held_out_of(context), Answers()
    policy = AnsweringPolicy(None, rollout, NoAnswers(), FixedModels(), micro)
    for _ in range(2):  # the second time with the same random numbers
        result = evaluate_policy(context, policy, held_out, num_prompts=num_prompts)
    ids = held_out.examples["ids"][:num_prompts]
    assert len(ids) == min(num_prompts, len(held_out.examples))
    lengths = [1 if len(row) % 2 == 0 else 3 for row in ids]
    count = len(ids)
    assert result.means["score"] == pytest.approx(
        sum(len(row) + n for row, n in zip(ids, lengths, strict=True)) / count
    )
    assert result.means["kl"] == pytest.approx(0.5 * sum(lengths) / count)
    assert result.means["ended"] == pytest.approx(sum(n == 1 for n in lengths) / count)
    assert result.means["tokens"] == pytest.approx(sum(lengths) / count)
    assert result.by_prompt["tokens"] == lengths
    assert result.by_prompt["score"] == [len(row) + n for row, n in zip(ids, lengths, strict=True)]
    assert (result.group_means("gold"), result.means.get("greedy")) == ({}, None)
    assert list(result.results(context.config, "after")) == [
        f"{name}_after" for name in ("score", "kl", "ended_share", "response_tokens")
    ]
    rows = held_out.examples["row"][:num_prompts]
    assert list(rollout.seen.values()) == [held_out.records[row].prompt for row in rows]


def test_gold_scores_are_those_of_the_texts(made: Make) -> None:
    context, _ = made()
    context = replace(context, judge=LengthJudge())
    held_out = held_out_of(context)
    policy = AnsweringPolicy(None, Answers(), NoAnswers(), FixedModels(), 2)
    result = evaluate_policy(context, policy, held_out, num_prompts=100)
    letters = len(context.tokenizer.decode([7]))
    prompts = [held_out.records[row].prompt for row in held_out.examples["row"]]
    ended = [len(ids) % 2 == 0 for ids in held_out.examples["ids"]]
    pairs = zip(ended, prompts, strict=True)
    golds = [(letters + 100 if ends else 3 * letters) + 1000 * len(p) for ends, p in pairs]
    assert result.means["gold/gold"] == pytest.approx(sum(golds) / len(golds))
    assert result.means["gold/exact"] == pytest.approx(sum(ended) / len(ended))
    assert result.means["greedy"] == 0, "the greedy answers are others"
    entries = result.results(context.config, "before")
    assert entries["gold_before"] == result.means["gold/gold"]
    assert entries["exact_before"] == result.means["gold/exact"]
    assert entries["exact_greedy_before"] == 0
    assert entries["gold_parts_before"] == {"correct": 0.5}
    values = result.metrics()
    assert values["ppo/eval_gold"] == result.means["gold/gold"]
    assert values["ppo/eval_exact_greedy"] == 0
    assert values["ppo/eval_correct"] == 0.5


def test_an_evaluation_asks_each_backend_once(made: Make) -> None:
    context, _ = made()
    sampling, greedy = Answers(), Answers()
    policy = AnsweringPolicy(None, sampling, greedy, FixedModels(), 2)
    judged = replace(context, judge=LengthJudge())
    evaluate_policy(judged, policy, held_out_of(context), num_prompts=100)
    assert (sampling.continues, greedy.continues) == ([False], [True])
    assert sampling.seen == greedy.seen


def test_samples_are_the_answers_to_the_same_prompts_at_every_step(made: Make) -> None:
    context, _ = made()
    held_out = held_out_of(context)
    policy = AnsweringPolicy(None, Answers(), NoAnswers(), FixedModels(), 3)
    first = sample_answers(context, policy, held_out, lambda _: None, model="actor")
    judged = replace(context, judge=LengthJudge())
    rising = sample_answers(judged, policy, held_out, numbered, model="actor_ema")
    count = min(8, len(held_out.examples))
    prompts = [held_out.records[row].prompt for row in held_out.examples["row"][:count]]
    ids = held_out.examples["ids"][:count]
    for samples in (first, rising):
        assert [sample.prompt for sample in samples] == prompts
        assert [sample.ended for sample in samples] == [len(row) % 2 == 0 for row in ids]
        assert {type(sample.kl) for sample in samples} == {float}
        for sample in samples:
            assert sum(token.kl for token in sample.tokens) == pytest.approx(sample.kl)
            texts = "".join(token.text for token in sample.tokens)
            assert sample.response.split() <= texts.split()
    assert {sample.model for sample in first} == {"actor"}
    assert {sample.model for sample in rising} == {"actor_ema"}
    assert {sample.gold_parts for sample in first} == {None}
    assert {token.advantage for sample in first for token in sample.tokens} == {None}
    for sample in rising:
        rated = LengthJudge().rate(sample.prompt, sample.response, ended=sample.ended)
        assert sample.gold_parts == rated
        assert [token.advantage for token in sample.tokens] == [0.0, 1.0, 2.0][: len(sample.tokens)]


def numbered(rollout: Rollout) -> TokenTargets:
    """Rewards of 0, and advantages that rise by one from token to token."""
    places_BT = torch.arange(rollout.values_BT.shape[1]).expand_as(rollout.values_BT).float()
    return TokenTargets(torch.zeros_like(places_BT), places_BT)
