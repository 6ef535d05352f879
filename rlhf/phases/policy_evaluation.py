"""How good a policy is on held-out prompts: score, gold score where it is known, and KL."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.streams import stream
from rlhf.data.collate import collate_prompts
from rlhf.data.records import Record
from rlhf.metrics import Mean, Metrics, merge_metrics
from rlhf.phases.context import EvalRows, RunContext, eval_batches
from rlhf.phases.ppo_metrics import kl_per_sequence
from rlhf.rollout.experience import Opinions, WholeSequences, collect
from rlhf.types import Engine, PromptBatch, Rollout, RolloutBackend

if TYPE_CHECKING:
    from datasets import Dataset


class AnsweringPolicy(NamedTuple):
    """What an evaluation asks for: answers, and opinions of them."""

    actor: Engine
    rollout: RolloutBackend
    opinions: Callable[[WholeSequences], Opinions]
    micro: int  # sequences that one rank runs at once


class HeldOutPrompts(NamedTuple):
    """Prompts to answer, as token ids, and the records that they came from (column ``row``)."""

    examples: Dataset
    records: list[Record]


class PolicyEvaluation(NamedTuple):
    """Means over held-out prompts."""

    score: float  # 0 where no reward model has an opinion
    gold: float | None  # gold score in [0, 1], where the data set has a judge
    kl_to_reference: float  # nats per sequence, k1
    ended_share: float


def evaluate_policy(
    context: RunContext, policy: AnsweringPolicy, held_out: HeldOutPrompts, *, num_prompts: int
) -> PolicyEvaluation:
    """Answer held-out prompts; the same random numbers each time, so that two policies compare.

    KL is that of the rollouts' temperature, wherever rollout.eval_temperature puts the answers.
    """
    total = min(len(held_out.examples), num_prompts)
    draws_NT = torch.rand(
        total,
        context.config.rollout.max_response_tokens,
        generator=stream(context.config.seed, "evaluation"),
    )
    metrics: Metrics = {}
    for batch in eval_batches(total, batch_size=policy.micro, ranks=context.ranks):
        prompts = _prompts(context, held_out, batch, draws_NT)
        responses = policy.rollout.generate(policy.actor, prompts)
        rollout = collect(policy.opinions, prompts, responses, micro_batch_size=policy.micro)
        part: Metrics = {
            "score": Mean.of(rollout.scores_B, batch.keep_B),
            "kl": Mean.of(kl_per_sequence(rollout), batch.keep_B),
            "ended": Mean.of(responses.ended_B.float(), batch.keep_B),
        }
        if context.judge is not None:
            gold_B = torch.tensor(gold_scores(context, rollout), device=context.ranks.device)
            part["gold"] = Mean.of(gold_B, batch.keep_B)
        metrics = merge_metrics(metrics, part)
    values = {n: m.value() for n, m in context.ranks.reduce_metrics(metrics).items()}
    return PolicyEvaluation(values["score"], values.get("gold"), values["kl"], values["ended"])


def response_texts(context: RunContext, rollout: Rollout) -> list[str]:
    """The responses as text, without the end token."""
    return [
        context.tokenizer.decode(ids_T[keep_T], skip_special_tokens=True)
        for ids_T, keep_T in zip(rollout.responses.ids_BT, rollout.responses.keep_BT, strict=True)
    ]


def gold_scores(context: RunContext, rollout: Rollout) -> list[float]:
    """Gold scores of the responses; only for data sets with a judge."""
    assert context.judge is not None
    texts, ended = response_texts(context, rollout), rollout.responses.ended_B.tolist()
    return [
        context.judge.score(prompt, text, ended=has_ended)
        for prompt, text, has_ended in zip(rollout.prompts.texts, texts, ended, strict=True)
    ]


def write_samples(context: RunContext, step: int, rollout: Rollout, *, count: int = 4) -> None:
    """Write the first few responses of a rollout to samples.jsonl."""
    if context.samples is None:
        return
    golds = gold_scores(context, rollout) if context.judge is not None else None
    texts = response_texts(context, rollout)
    for row in range(min(count, len(texts))):
        context.samples.write(
            phase="ppo",
            step=step,
            prompt=rollout.prompts.texts[row],
            response=texts[row],
            score=float(rollout.scores_B[row]),
            gold=None if golds is None else golds[row],
        )


def _prompts(
    context: RunContext, held_out: HeldOutPrompts, batch: EvalRows, draws_NT: Tensor
) -> PromptBatch:
    chosen = held_out.examples[batch.rows]
    return collate_prompts(
        chosen["ids"],
        [held_out.records[row].prompt or "" for row in chosen["row"]],
        draws_NT[batch.rows],
        pad_id=context.tokenizer.pad_token_id,
        device=context.ranks.device,
    )
