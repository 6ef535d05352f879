"""The data of each phase: records, and token ids, which are cached on the drive."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING

from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase
from rlhf.data.pair_numbers import add_pair_numbers, read_pair_groups
from rlhf.data.splits import PhaseData
from rlhf.data.tokens import TokenData, cache_key, limit_of, tokenise
from rlhf.phases.shared.context import RunContext

if TYPE_CHECKING:
    from datasets import Dataset


def phase_records(context: RunContext, phase: Phase) -> PhaseData:
    """Return the records that a phase trains on; DPO uses the reward phase's pairs."""
    return context.parts[phase.data_share]


def phase_tokens(context: RunContext, phase: Phase) -> TokenData:
    """Return the phase's token ids."""
    return _tokenise(context, phase_records(context, phase), phase)


def reward_pairs(context: RunContext) -> tuple[Dataset, Dataset]:
    """Return the pairs to train on and the held-out pairs, with the numbers that the loss reads.

    Raises:
        DataError: if a pair lacks such a number.
    """
    data, records = phase_tokens(context, Phase.reward), phase_records(context, Phase.reward)
    add = partial(add_pair_numbers, config=context.config.reward)
    return add(data.train, records.train), add(data.eval, records.eval)


def phase_prompts(context: RunContext, phase: Phase) -> TokenData:
    """Return the prompts of a phase's records, as token ids."""
    return _tokenise(context, phase_records(context, phase), Phase.ppo)


def phase_data_hash(context: RunContext, phase: Phase) -> str:
    """Return a hash of the phase's records, the tokenizer, the token limit and the template.

    The hash of the reward phase includes the groups of pairs on which the model is measured.
    """
    config = context.config
    groups = read_pair_groups(config.reward.groups_path) if phase is Phase.reward else {}
    measured = hashlib.sha256(repr(sorted(groups.items())).encode()).hexdigest() if groups else ""
    return measured + cache_key(
        phase_records(context, phase),
        phase,
        context.tokenizer,
        limit=limit_of(phase, config).tokens,
        template=config.data.template,
    )


def _tokenise(context: RunContext, part: PhaseData, phase: Phase) -> TokenData:
    config = context.config
    return tokenise(
        part,
        phase,
        context.tokenizer,
        limit=limit_of(phase, config),
        cache_dir=expand_user_path(config.data.cache_dir, key="data.cache_dir"),
        template=config.data.template,
    )
