"""Evaluation of a policy on held-out prompts: score, gold score if there is a judge, and KL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlhf.data.collate import collate_prompts
from rlhf.data.records import Record
from rlhf.metrics import Mean, Metrics, merge_metrics
from rlhf.phases.shared.context import EvalRows, RunContext, eval_batches
from rlhf.phases.shared.scoring import (
    ScoringModels,
    kl_per_sequence,
    ratings,
    response_texts,
    score_responses,
)
from rlhf.random_streams import stream
from rlhf.types import Engine, PromptBatch, Responses, Rollout, RolloutBackend

if TYPE_CHECKING:
    from datasets import Dataset


SAMPLES = 8  # held-out prompts whose answers are written to samples.jsonl


class AnsweringPolicy(NamedTuple):
    """A policy to evaluate: backends that sample its responses, and models that score them."""

    actor: Engine
    sampling: RolloutBackend
    greedy: RolloutBackend  # always takes the most likely token
    models: ScoringModels
    micro: int  # micro-batch size: sequences that one rank runs at once


class HeldOutPrompts(NamedTuple):
    """Prompts to answer, as token ids; column ``row`` is the index of each prompt's record."""

    examples: Dataset
    records: list[Record]


class PolicyEvaluation(NamedTuple):
    """Means over held-out prompts."""

    score: float  # from the reward model, or the judge instead of it; 0 in DPO
    kl_to_reference: float  # nats per sequence, k1
    ended_share: float
    response_tokens: float
    gold_parts: dict[str, float]  # "gold", "exact" and parts of the gold score; empty: no judge
    exact_greedy: float | None  # share of exactly right greedy answers; None: no judge

    @property
    def gold(self) -> float | None:
        """Return the mean gold score in [0, 1]; None without a judge."""
        return self.gold_parts.get("gold")

    def result(self, when: str) -> dict[str, Any]:
        """Return the entries of result.json; their names end in ``when``."""
        values: dict[str, Any] = {
            f"score_{when}": self.score,
            f"kl_{when}": self.kl_to_reference,
            f"ended_share_{when}": self.ended_share,
            f"response_tokens_{when}": self.response_tokens,
        }
        if not self.gold_parts:
            return values
        parts = dict(self.gold_parts)
        return values | {
            f"gold_{when}": parts.pop("gold"),
            f"exact_{when}": parts.pop("exact"),
            f"exact_greedy_{when}": self.exact_greedy,
            f"gold_parts_{when}": parts,
        }

    def metrics(self) -> dict[str, float]:
        """Return the means as metrics of a PPO step, named ppo/eval_*."""
        values = {
            "eval_score": self.score,
            "eval_kl": self.kl_to_reference,
            "eval_ended_share": self.ended_share,
            "eval_response_tokens": self.response_tokens,
        }
        values |= {f"eval_{name}": value for name, value in self.gold_parts.items()}
        if self.exact_greedy is not None:
            values["eval_exact_greedy"] = self.exact_greedy
        return {f"ppo/{name}": value for name, value in values.items()}


def evaluate_policy(
    context: RunContext, policy: AnsweringPolicy, held_out: HeldOutPrompts, *, num_prompts: int
) -> PolicyEvaluation:
    """Answer held-out prompts and return means over the answers.

    Every call samples with the same random numbers, so that two policies can be compared. The KL is
    computed at rollout.temperature, even if rollout.eval_temperature samples the answers.
    """
    metrics: Metrics = {}
    greedy: Metrics = {}
    for rollout, keep_B in _answered(context, policy, held_out, num_prompts=num_prompts):
        responses = rollout.responses
        part: Metrics = {
            "score": Mean.of(rollout.scores_B, keep_B),
            "kl": Mean.of(kl_per_sequence(rollout), keep_B),
            "ended": Mean.of(responses.ended_B.float(), keep_B),
            "tokens": Mean.of(responses.keep_BT.sum(dim=1), keep_B),
        }
        metrics = merge_metrics(metrics, part | _gold(context, rollout.prompts, responses, keep_B))
    if context.judge is not None:
        for prompts, keep_B in _batches(context, policy, held_out, num_prompts=num_prompts):
            responses = policy.greedy.generate(policy.actor, prompts)
            gold = _gold(context, prompts, responses, keep_B)
            greedy = merge_metrics(greedy, {"greedy": gold["gold/exact"]})
    values = {n: m.value() for n, m in context.ranks.reduce_metrics(metrics | greedy).items()}
    return PolicyEvaluation(
        score=values["score"],
        kl_to_reference=values["kl"],
        ended_share=values["ended"],
        response_tokens=values["tokens"],
        gold_parts={
            name.removeprefix("gold/"): value
            for name, value in values.items()
            if name.startswith("gold/")
        },
        exact_greedy=values.get("greedy"),
    )


def write_samples(
    context: RunContext, step: int, policy: AnsweringPolicy, held_out: HeldOutPrompts
) -> None:
    """Answer the first held-out prompts and write the answers to samples.jsonl.

    Prompts and random numbers are the same at every step, so that answers can be compared.
    """
    for rollout, keep_B in _answered(context, policy, held_out, num_prompts=SAMPLES):
        if context.samples is None:
            continue
        texts = response_texts(context.tokenizer, rollout.responses)
        ended = rollout.responses.ended_B.tolist()
        for row in keep_B.nonzero().flatten().tolist():
            prompt = rollout.prompts.texts[row]
            context.samples.write(
                phase="ppo",
                step=step,
                prompt=prompt,
                response=texts[row],
                ended=ended[row],
                score=float(rollout.scores_B[row]),
                gold_parts=None
                if context.judge is None
                else context.judge.rate(prompt, texts[row], ended=ended[row]),
            )


def _gold(
    context: RunContext, prompts: PromptBatch, responses: Responses, keep_B: Tensor
) -> Metrics:
    """Return the judge's ratings of responses, as metrics whose names start with "gold/"."""
    if context.judge is None:
        return {}
    rated = ratings(context.judge, context.tokenizer, prompts, responses)
    device = context.ranks.device
    return {
        f"gold/{name}": Mean.of(torch.tensor([each[name] for each in rated], device=device), keep_B)
        for name in rated[0]
    }


def _answered(
    context: RunContext, policy: AnsweringPolicy, held_out: HeldOutPrompts, *, num_prompts: int
) -> Iterator[tuple[Rollout, Tensor]]:
    """Yield scored answers to held-out prompts, and a mask (B,), False for rows that only pad."""
    for prompts, keep_B in _batches(context, policy, held_out, num_prompts=num_prompts):
        responses = policy.sampling.generate(policy.actor, prompts)
        rollout = score_responses(policy.models, prompts, responses, micro_batch_size=policy.micro)
        yield rollout, keep_B


def _batches(
    context: RunContext, policy: AnsweringPolicy, held_out: HeldOutPrompts, *, num_prompts: int
) -> Iterator[tuple[PromptBatch, Tensor]]:
    """Yield held-out prompts of this rank, and a mask (B,), False for rows that only pad."""
    total = min(len(held_out.examples), num_prompts)
    draws_NT = torch.rand(
        total,
        context.config.rollout.max_response_tokens,
        generator=stream(context.config.seed, "evaluation"),
    )
    for batch in eval_batches(total, batch_size=policy.micro, ranks=context.ranks):
        yield _prompts(context, held_out, batch, draws_NT), batch.keep_B


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
