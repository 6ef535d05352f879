"""The context that every phase gets, and functions that read the phase's data from it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.base.hashing import sha256_of
from rlhf.base.heartbeat import Heartbeat
from rlhf.base.ranks import Ranks
from rlhf.base.user_paths import expand_user_path
from rlhf.config.batches import num_phase_steps
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.config.schema.supervised import PairsConfig
from rlhf.data.pair_numbers import add_pair_numbers, read_pair_groups
from rlhf.data.splits import PhaseData, swap_answers
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.data.tokens import TokenData, cache_key, find_example_kind, find_token_limit, tokenise
from rlhf.engine.settings import EngineSettings
from rlhf.phases.shared.step_signals import StopRequests
from rlhf.run.console import Console
from rlhf.run.phase_state import Checkpoint
from rlhf.run.tracker import Tracker

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One rank's view of the run: its configuration, ranks, data and outputs."""

    config: RunConfig
    run_dir: Path
    ranks: Ranks
    settings: EngineSettings
    tokenizer: PreTrainedTokenizerBase
    parts: Mapping[Phase, PhaseData]  # training and held-out records of each phase
    judge: GoldJudge | None  # computes gold scores; None: the data has none
    console: Console
    tracker: Tracker
    resumes: Mapping[Phase, Checkpoint] = field(default_factory=dict)  # checkpoints to resume from
    requests: StopRequests = field(default_factory=StopRequests)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    phase_started: float = field(default_factory=time.monotonic)  # by time.monotonic()
    opened: ExitStack = field(default_factory=ExitStack)  # closed when the phase ends or fails


def phase_records(context: RunContext, phase: Phase) -> PhaseData:
    """Return the records of a phase; DPO uses the reward phase's pairs."""
    return context.parts[phase.phase_in_split]


def records_with_label_noise(context: RunContext, phase: Phase) -> PhaseData:
    """Return the records of a phase; label_noise swaps the answers of a share of training pairs."""
    part, config = phase_records(context, phase), context.config
    learners: dict[Phase, PairsConfig] = {Phase.reward: config.reward, Phase.dpo: config.dpo}
    if phase not in learners or not learners[phase].label_noise:
        return part
    return swap_answers(part, share=learners[phase].label_noise, seed=config.data_seed)


def phase_tokens(context: RunContext, phase: Phase) -> TokenData:
    """Return the token ids of a phase's records."""
    return _tokenise(context, records_with_label_noise(context, phase), phase)


def count_ppo_steps(context: RunContext) -> RunContext:
    """Return ``context`` with ``ppo.steps`` set, which may depend on the number of prompts."""
    config, examples = context.config, len(phase_tokens(context, Phase.ppo).train)
    ppo = replace(config.ppo, steps=num_phase_steps(config, Phase.ppo, examples=examples))
    return replace(context, config=replace(config, ppo=ppo))


def reward_pairs(context: RunContext) -> tuple[Dataset, Dataset]:
    """Return training and held-out pairs or graded responses, with what the loss reads."""
    records = records_with_label_noise(context, Phase.reward)
    data = _tokenise(context, records, Phase.reward)
    add = partial(add_pair_numbers, config=context.config.reward)
    return add(data.train, records.train), add(data.eval, records.eval)


def phase_prompts(context: RunContext, phase: Phase) -> TokenData:
    """Return the prompts of a phase's records, as token ids."""
    return _tokenise(context, phase_records(context, phase), Phase.ppo)


def phase_data_hash(context: RunContext, phase: Phase) -> str:
    """Return a hash of the phase's records, the tokenizer, the token limit and the template.

    The reward phase's hash includes the pairs of reward.groups_path, on which it is measured.
    """
    config = context.config
    groups = read_pair_groups(config.reward.groups_path) if phase is Phase.reward else {}
    measured = sha256_of(repr(sorted(groups.items())).encode()) if groups else ""
    return measured + cache_key(
        records_with_label_noise(context, phase),
        find_example_kind(phase, config),
        context.tokenizer,
        limit=find_token_limit(phase, config).tokens,
        template=config.data.template,
    )


def _tokenise(context: RunContext, part: PhaseData, phase: Phase) -> TokenData:
    config = context.config
    return tokenise(
        part,
        find_example_kind(phase, config),
        context.tokenizer,
        limit=find_token_limit(phase, config),
        cache_dir=expand_user_path(config.data.cache_dir, key="data.cache_dir"),
        template=config.data.template,
    )
