"""Check that a phase has the examples that it needs, and describe them.

The launcher and ``plan=only`` call these functions before a run is made; every rank calls them
before the first phase is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from rlhf.base.errors import ConfigError, DataError
from rlhf.config.batches import batch_sizes_for_few, examples_per_step, num_phase_steps
from rlhf.config.choices import Phase
from rlhf.config.schema.ppo import check_ppo
from rlhf.config.schema.run import RunConfig
from rlhf.data.records import SCORED

AS_MARKS = (
    ". Turn scores into good/bad labels in data.sets.NAME.columns (docs/data.md), for example "
    "with grade: 'to_number(COLUMN) >= `4`'"
)


class PhaseExamples(NamedTuple):
    """The numbers of examples that a phase uses, and the numbers that it skips, by reason."""

    train: int
    eval: int
    left_out: Mapping[str, int]
    answered: int
    """The number of held-out prompts that DPO answers; only DPO uses it."""

    @property
    def skipped_text(self) -> str:
        """Return the numbers of skipped examples with their reasons, as text."""
        return ", ".join(f"{count} {reason}" for reason, count in self.left_out.items() if count)


def describe_phase_examples(phase: Phase, examples: PhaseExamples) -> str:
    """Return one line for the terminal: the numbers of examples that a phase uses and skips."""
    text = f"{phase}: {examples.train} examples to train on, {examples.eval} held out"
    return f"{text}; skipped: {examples.skipped_text}" if examples.skipped_text else text


def require_examples(config: RunConfig, examples: Mapping[Phase, PhaseExamples]) -> None:
    """Check that each phase has at least one batch to train on, and one held-out example.

    Raises:
        DataError: if a phase lacks examples; the message names batch sizes that would work.
        ConfigError: if checkpoint.stop_after is past the last step, or keys of PPO require more
            steps than its examples allow.
    """
    needed = {phase: examples_per_step(config, phase) for phase in examples}
    short = {p: each for p, each in examples.items() if each.train < needed[p] or not each.eval}
    if short:
        rollout = config.ppo.rollout_batch_size
        counts = "; ".join(
            _describe_shortage(phase, each, needed=needed[phase], rollout=rollout)
            for phase, each in short.items()
        )
        sizes = [
            batch_sizes_for_few(config, phase, examples=each.train) if each.eval else None
            for phase, each in short.items()
        ]
        has_scores = any(each.left_out.get(SCORED) for each in short.values())
        known_sizes = [size for size in sizes if size is not None]
        fix = f"Use {' '.join(known_sizes)}, or give" if len(known_sizes) == len(sizes) else "Give"
        raise DataError(
            f"data: {counts}. {fix} more data, a larger share of data.split, or higher token "
            f"limits if many examples were skipped{AS_MARKS * has_scores}"
        )
    if Phase.dpo in examples and not examples[Phase.dpo].answered:
        raise DataError(
            "data: the dpo phase has no held-out prompt to answer that fits "
            f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens}; raise that limit"
        )
    stop = (config.checkpoint.stop_after or "").partition("/")
    for phase in examples:
        steps = num_phase_steps(config, phase, examples=examples[phase].train)
        if phase == stop[0] and int(stop[2]) > steps:
            raise ConfigError(
                f"checkpoint.stop_after={phase}/{stop[2]}: the {phase} phase has {steps} steps; "
                f"use {phase}/{steps} or less, or checkpoint.stop_after=null"
            )
    if Phase.ppo in examples:
        steps = num_phase_steps(config, Phase.ppo, examples=examples[Phase.ppo].train)
        check_ppo(replace(config.ppo, steps=steps))


def _describe_shortage(phase: Phase, examples: PhaseExamples, *, needed: int, rollout: int) -> str:
    """Return the numbers of examples that a phase has and needs; ``rollout``: PPO's batch size."""
    size = f"{phase}.batch_size={needed}"
    if phase is Phase.ppo:
        size = f"ppo.rollout_batch_size={rollout}"
    skipped = f" ({examples.skipped_text})" if examples.skipped_text else ""
    return (
        f"the {phase} phase has {examples.train} examples to train on and {examples.eval} held out"
        f"{skipped}, but {size} needs at least {needed}, and 1 held out"
    )
