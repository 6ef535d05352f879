"""The data of each phase: records, and token ids, which are cached on the drive."""

from __future__ import annotations

from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase
from rlhf.data.splits import PhaseData
from rlhf.data.tokens import TokenData, cache_key, limit_of, tokenise
from rlhf.phases.shared.context import RunContext


def phase_records(context: RunContext, phase: Phase) -> PhaseData:
    """Return the records that a phase trains on; DPO uses the reward phase's pairs."""
    return context.parts[phase.data_share]


def phase_tokens(context: RunContext, phase: Phase) -> TokenData:
    """Return the phase's token ids."""
    return _tokenise(context, phase_records(context, phase), phase)


def phase_prompts(context: RunContext, phase: Phase) -> TokenData:
    """Return the prompts of a phase's records, as token ids."""
    return _tokenise(context, phase_records(context, phase), Phase.ppo)


def phase_data_hash(context: RunContext, phase: Phase) -> str:
    """Return a hash of the phase's records, the tokenizer, the token limit and the template."""
    config = context.config
    return cache_key(
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
