"""What a judge adds to the evaluation of a reward model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlhf.config.choices import Phase
from rlhf.data.records import Record
from rlhf.data.tokens import Encoder, Limit, pair_columns
from rlhf.phases.context import RunContext

if TYPE_CHECKING:
    from datasets import Dataset


def judge_reward_model(
    context: RunContext, examples: Dataset, accuracy_of: Callable[[Dataset], float]
) -> dict[str, Any]:
    """Return the entries of result.json that need a judge; none without a judge.

    ``best_possible_accuracy`` is the expected accuracy on the held-out pairs of a reward model that
    knows the gold scores. ``minimal_pairs`` is, by kind, the share of right responses that score
    above their copy with one flaw: average accuracy hides it, since most pairs differ in more.
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
