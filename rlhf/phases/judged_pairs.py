"""The part of a reward model's evaluation that requires a judge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlhf.config.choices import Phase
from rlhf.data.records import Record
from rlhf.data.tokens import Encoder, Limit, pair_columns
from rlhf.phases.shared.context import RunContext

if TYPE_CHECKING:
    from datasets import Dataset


def judge_reward_model(
    context: RunContext, examples: Dataset, accuracy_of: Callable[[Dataset], float]
) -> dict[str, Any]:
    """Return the entries of result.json that require a judge; an empty dict without a judge.

    ``best_possible_accuracy`` is the expected accuracy on the held-out pairs if every response is
    scored with its gold score. ``minimal_pairs`` is, for each kind of flaw, the share of right
    responses that score above a copy with this one flaw: most pairs differ in more than one.
    """
    if context.judge is None:
        return {}
    from datasets import Dataset

    config = context.config
    held_out = context.parts[Phase.reward].eval
    records = [held_out[row] for row in examples["row"][: config.reward.eval_examples]]
    pairs: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        assert record.prompt is not None
        made = context.judge.minimal_pairs(record.prompt, seed=config.seed)
        for kind, (right, flawed) in made.items():
            pairs[kind].append(Record(prompt=record.prompt, chosen=right, rejected=flawed))
    encoder = Encoder(context.tokenizer, config.data.template)
    limit = Limit("reward.max_tokens", config.reward.max_tokens)
    shares = {}
    for kind, alike in pairs.items():
        columns, _ = pair_columns(list(enumerate(alike)), encoder, limit)
        shares[kind] = accuracy_of(Dataset.from_dict(columns))
    return {
        "best_possible_accuracy": context.judge.best_accuracy(records),
        "minimal_pairs": shares,
    }
