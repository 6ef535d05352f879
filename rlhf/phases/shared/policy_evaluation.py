"""Evaluation of a policy on held-out prompts: score, gold score if there is a judge, and KL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlhf.base.intervals import mean_of
from rlhf.base.random_streams import random_stream
from rlhf.base.stored_responses import join_rows, take_responses
from rlhf.base.types import (
    Engine,
    PromptBatch,
    Responses,
    Rollout,
    RolloutBackend,
    Shown,
    TokenTargets,
)
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.data.collate import EvalRows, collate_prompts, eval_batches
from rlhf.data.records import Record, seeds_of_records
from rlhf.phases.shared.context import RunContext, phase_prompts, phase_records
from rlhf.phases.shared.exporting import computing_as_saved
from rlhf.phases.shared.scoring import (
    ScoringModels,
    kl_per_sequence,
    rate_responses,
    response_texts,
    score_responses,
)
from rlhf.run.tracker import Sample, Token

if TYPE_CHECKING:
    from datasets import Dataset

SAMPLED_PROMPTS = 8  # number of held-out prompts whose answers are written to samples.jsonl


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
    records: Sequence[Record]

    @classmethod
    def from_phase(cls, context: RunContext, phase: Phase) -> HeldOutPrompts:
        """Return the held-out prompts of a phase."""
        return cls(phase_prompts(context, phase).eval, phase_records(context, phase).eval)


# Measures by their names here, with their names in result.json and in metrics.
TITLES = {"score": "score", "kl": "kl", "ended": "ended_share", "tokens": "response_tokens"}


class PolicyEvaluation(NamedTuple):
    """Measures of a policy's answers: means over held-out prompts, and the value of each prompt.

    The mean ``score`` is of the reward model's scores or, without one, of the judge's; in DPO it is
    0. The mean ``greedy`` is the share of exactly right greedy answers, if there is a judge.
    """

    means: dict[str, float]
    by_prompt: dict[str, list[float]]

    def group_means(self, group: str) -> dict[str, float]:
        """Return the means named ``group``/NAME (gold/exact, for example) by NAME."""
        prefix = f"{group}/"
        group_means = {name: mean for name, mean in self.means.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): mean for name, mean in group_means.items()}

    def results(self, config: RunConfig, when: str) -> dict[str, Any]:
        """Return the entries of result.json; their names end in ``when``."""
        values: dict[str, Any] = {f"{t}_{when}": self.means[name] for name, t in TITLES.items()}
        if config.environment.is_used:
            from rlhf.options.environments.responses import evaluation_results

            values |= evaluation_results(self.by_prompt, when)
        if parts := self.group_means("parts"):
            values[f"score_parts_{when}"] = parts
        if gold := self.group_means("gold"):
            values |= {f"{name}_{when}": gold.pop(name) for name in ("gold", "exact")}
            values |= {f"exact_greedy_{when}": self.means["greedy"], f"gold_parts_{when}": gold}
        return values

    def metrics(self) -> dict[str, float]:
        """Return the means as metrics of a PPO step, named ppo/eval_*."""
        values = {title: self.means[name] for name, title in TITLES.items()}
        values |= self.group_means("gold")
        if "greedy" in self.means:
            values["exact_greedy"] = self.means["greedy"]
        groups = {name.partition("/")[0] for name in self.means if "/" in name}
        for group in ["parts", *sorted(groups - {"gold", "parts"})]:
            values |= {f"{group}/{name}": mean for name, mean in self.group_means(group).items()}
        return {f"ppo/eval_{name}": value for name, value in values.items()}


def evaluate_policy(
    context: RunContext, policy: AnsweringPolicy, held_out: HeldOutPrompts, *, num_prompts: int
) -> PolicyEvaluation:
    """Answer held-out prompts and return means over the answers.

    Every call samples with the same random numbers, so that two policies can be compared. The KL is
    computed at rollout.temperature, even if rollout.eval_temperature samples the answers.
    """
    total = min(len(held_out.examples), num_prompts)
    values_by_name: dict[str, Tensor] = {}
    for rollout, batch in answer_prompts(context, policy, held_out, num_prompts=num_prompts):
        _store_values(measure_answers(context, rollout), batch, into=values_by_name, total=total)
    if context.judge is not None:
        batches = _prompt_batches(context, policy, held_out, num_prompts=num_prompts)
        greedy = ((prompts._replace(keeps_weights=True), batch) for prompts, batch in batches)
        for prompts, responses, batch in _answer(context, policy.actor, policy.greedy, greedy):
            exact_B = _gold_ratings(context, prompts, responses)["gold/exact"]
            _store_values({"greedy": exact_B}, batch, into=values_by_name, total=total)
    by_prompt_VN = context.ranks.sum(torch.stack(list(values_by_name.values())))
    by_prompt = dict(zip(values_by_name, by_prompt_VN.tolist(), strict=True))
    return PolicyEvaluation({n: mean_of(each) for n, each in by_prompt.items()}, by_prompt)


def measure_answers(context: RunContext, rollout: Rollout) -> dict[str, Tensor]:
    """Return measures (B,) of the answers by name, such as score, kl and tokens."""
    responses = rollout.responses
    values = {
        "score": rollout.scores_B,
        "kl": kl_per_sequence(rollout),
        "ended": responses.ended_B,
        "tokens": responses.keep_BT.sum(dim=1),
    }
    if context.config.environment.is_used:
        from rlhf.options.environments.responses import measure_responses

        values |= measure_responses(responses)
    values |= _gold_ratings(context, rollout.prompts, responses)
    if rollout.parts is not None:
        parts = zip(context.config.rewards, rollout.parts.scores_BK.unbind(1), strict=True)
        named = (*parts, *rollout.parts.criteria.items())
        values |= {f"parts/{name}": each for name, each in named}
    return values


def _store_values(
    values: Mapping[str, Tensor], batch: EvalRows, *, into: dict[str, Tensor], total: int
) -> None:
    """Copy a batch's values (B,) into the tensors ``into``, which are of all ``total`` prompts."""
    rows = torch.tensor(batch.rows, device=batch.keep_B.device)[batch.keep_B]
    for name, values_B in values.items():
        zeros_N = torch.zeros(total, dtype=torch.float64, device=values_B.device)
        into.setdefault(name, zeros_N)[rows] = values_B[batch.keep_B].double()


def describe_answers(context: RunContext, rollout: Rollout) -> list[Shown]:
    """Return the texts of each row's prompt and response, in the form of samples.jsonl."""
    texts = response_texts(context.tokenizer, rollout.responses)
    if context.config.environment.is_used:
        from rlhf.options.environments.responses import texts_to_show

        return texts_to_show(rollout, texts)
    return [Shown(*each) for each in zip(rollout.prompts.texts, texts, strict=True)]


HeldOutTargets = Callable[[Rollout], TokenTargets | None]


def sample_answers(
    context: RunContext,
    policy: AnsweringPolicy,
    held_out: HeldOutPrompts,
    targets: HeldOutTargets,
    *,
    model: str,
) -> list[Sample]:
    """Answer the first ``SAMPLED_PROMPTS`` held-out prompts; return this rank's answers.

    ``targets`` returns the rewards and advantages of a rollout's tokens, or None if the estimator
    has none. ``model`` is the name of the policy in each answer.
    """
    samples: list[Sample] = []
    for rollout, batch in answer_prompts(context, policy, held_out, num_prompts=SAMPLED_PROMPTS):
        of_tokens = targets(rollout)
        shown = describe_answers(context, rollout)
        ended, kls = rollout.responses.ended_B.tolist(), kl_per_sequence(rollout).tolist()
        for row in batch.keep_B.nonzero().flatten().tolist():
            sample = Sample(
                **shown[row]._asdict(),
                ended=ended[row],
                score=float(rollout.scores_B[row]),
                kl=kls[row],
                tokens=_build_tokens(context, rollout, of_tokens, row),
                model=model,
                gold_parts=None
                if context.judge is None
                else context.judge.rate(shown[row].prompt, shown[row].response, ended=ended[row]),
            )
            samples.append(sample)
    return samples


def _build_tokens(
    context: RunContext, rollout: Rollout, targets: TokenTargets | None, row: int
) -> list[Token]:
    """Return a response's tokens with KL and, with ``targets``, value, advantage and reward."""
    keep_T = rollout.responses.keep_BT[row]
    columns = [rollout.responses.ids_BT, rollout.logprobs_BT - rollout.reference_logprobs_BT]
    if targets is not None:
        columns += [rollout.values_BT, targets.advantages_BT, targets.rewards_BT]
    ids, *numbers = (column_BT[row][keep_T].tolist() for column_BT in columns)
    texts = [context.tokenizer.decode([each]) for each in ids]
    return [Token(*each) for each in zip(texts, *numbers, strict=True)]


def _gold_ratings(
    context: RunContext, prompts: PromptBatch, responses: Responses
) -> dict[str, Tensor]:
    """Return the judge's ratings (B,) of responses; their names start with "gold/"."""
    if context.judge is None:
        return {}
    rated = rate_responses(context.judge, context.tokenizer, prompts, responses)
    device = context.ranks.device
    return {
        f"gold/{name}": torch.tensor([each[name] for each in rated], device=device)
        for name in rated[0]
    }


def answer_prompts(
    context: RunContext,
    policy: AnsweringPolicy,
    held_out: HeldOutPrompts,
    *,
    num_prompts: int,
    sample: int = 0,
    greedy: bool = False,
) -> Iterator[tuple[Rollout, EvalRows]]:
    """Yield, per micro-batch, scored answers to held-out prompts and the prompts' indices.

    Another ``sample`` draws other random numbers; the evaluations of the phases use sample 0.
    """
    backend = policy.greedy if greedy else policy.sampling
    batches = _prompt_batches(context, policy, held_out, num_prompts=num_prompts, sample=sample)
    micro = policy.micro
    for prompts, responses, batch in _answer(context, policy.actor, backend, batches):
        with computing_as_saved(context.config, policy.actor):
            rollout = score_responses(policy.models, prompts, responses, micro_batch_size=micro)
        yield rollout, batch


def _answer(
    context: RunContext,
    actor: Engine,
    backend: RolloutBackend,
    batches: Iterable[tuple[PromptBatch, EvalRows]],
) -> Iterator[tuple[PromptBatch, Responses, EvalRows]]:
    """Answer the prompts of all micro-batches at once; yield each micro-batch with its answers.

    So a server gets the weights only once, and no decoder row waits for the end of a micro-batch.
    """
    pairs = list(batches)
    prompts = join_rows([each for each, _ in pairs], pad_id=context.tokenizer.pad_token_id)
    responses, start = backend.generate(actor, prompts), 0
    for micro_batch, eval_rows in pairs:
        context.heartbeat.beat()
        rows = list(range(start, start := start + len(eval_rows.rows)))
        yield micro_batch, take_responses(responses, rows, context.ranks.device), eval_rows


def _prompt_batches(
    context: RunContext,
    policy: AnsweringPolicy,
    held_out: HeldOutPrompts,
    *,
    num_prompts: int,
    sample: int = 0,
) -> Iterator[tuple[PromptBatch, EvalRows]]:
    """Yield micro-batches of this rank's held-out prompts, and their rows among all prompts."""
    total = min(len(held_out.examples), num_prompts)
    draws_NT = torch.rand(
        total,
        context.config.max_policy_tokens,
        generator=random_stream(context.config.seed, "evaluation", *([sample] if sample else [])),
    )
    for batch in eval_batches(total, batch_size=policy.micro, ranks=context.ranks):
        chosen = held_out.examples[batch.rows]
        records = [held_out.records[row] for row in chosen["row"]]
        prompts = collate_prompts(
            chosen["ids"],
            [each.prompt or "" for each in records],
            draws_NT[batch.rows],
            pad_id=context.tokenizer.pad_token_id,
            device=context.ranks.device,
            columns=[each.columns or {} for each in records],
        )
        yield prompts._replace(seeds=seeds_of_records(records)), batch
