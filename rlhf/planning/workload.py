"""What a run reads: steps, held-out examples and lengths of every phase."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf.config.choices import SPLIT_PHASES, Phase, Source
from rlhf.config.schema import DataConfig, RunConfig

COUNTED = (".jsonl", ".csv")  # files of one example a line
LARGEST = 2**30  # bytes of a file whose lines are counted


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one phase reads: SFT examples, pairs of the reward and dpo phases, prompts of PPO."""

    steps: int | None
    """Optimiser steps, rounds of PPO; None if the examples cannot be counted."""
    lengths: tuple[int, ...]
    """Tokens of sequences (in PPO, of prompts), from the shortest to the longest, evenly spread."""
    held_out: int = 0
    """Examples held out; 0 if that is not known."""
    records: int = 0
    """Examples of the whole run, which its processes hold; 0 if that is not known."""
    answer: float | None = None
    """Tokens that PPO's responses are expected to have; None: as many as they may."""

    @property
    def tokens(self) -> float:
        """Mean length."""
        return sum(self.lengths) / len(self.lengths)

    @property
    def longest(self) -> int:
        """The greatest length."""
        return self.lengths[-1]

    def padded(self, passes: int, *, micro: int, is_sorted: bool) -> list[int]:
        """Return the length that each of ``passes`` micro-batches of ``micro`` is padded to.

        That of its longest sequence, as it is on average: of all, or of its part of them where
        sequences are sorted by length.
        """
        share = micro / (micro + 1)  # mean of the greatest of ``micro`` uniform numbers
        places = [(i + share) / passes if is_sorted else share for i in range(passes)]
        return [
            self.lengths[min(int(p * len(self.lengths)), len(self.lengths) - 1)] for p in places
        ]


Loads = Mapping[Phase, Load]


def assumed_loads(config: RunConfig) -> dict[Phase, Load]:
    """Return the loads of data that has not been read: every sequence as long as it may be."""
    longest = {
        Phase.sft: config.sft.max_tokens,
        Phase.reward: config.reward.max_tokens,
        Phase.dpo: config.dpo.max_tokens,
        Phase.ppo: config.rollout.max_prompt_tokens,
    }
    records = total_examples(config.data) or 0
    return {
        phase: Load(steps=steps_of(config, phase), lengths=(longest[phase],), records=records)
        for phase in config.phase.order
    }


def steps_of(config: RunConfig, phase: Phase) -> int | None:
    """Optimiser steps of a phase, rounds of PPO; None where the examples cannot be counted."""
    examples = examples_of(config.data, phase)
    if phase is Phase.ppo:
        ppo = config.ppo
        if ppo.epochs is None or examples is None:
            return ppo.steps
        per_step = ppo.rollout_batch_size // ppo.responses_per_prompt
        steps = max(1, math.floor(ppo.epochs * examples / per_step))
        return steps if ppo.steps is None else min(steps, ppo.steps)
    if examples is None:
        return None
    settings = getattr(config, phase.value)
    return max(1, math.floor(float(settings.epochs) * examples / int(settings.batch_size)))


def examples_of(data: DataConfig, phase: Phase) -> int | None:
    """Training examples of a phase: its share of data.size, or of the lines of a local file."""
    total = total_examples(data)
    if total is None:
        return None
    part = Phase.reward if phase is Phase.dpo else phase
    share = data.split[SPLIT_PHASES.index(part)] / sum(data.split)
    # The known hub sets have held-out splits of their own.
    held_out = data.eval_share if data.source is not Source.hub and data.eval_path is None else 0.0
    return int(total * share * (1 - held_out))


def total_examples(data: DataConfig) -> int | None:
    """Return data.size, or the lines of a local file; None where they cannot be counted."""
    return data.size or _lines(data)


def in_words(data: DataConfig) -> str:
    """Return the examples and their number, as in "9,000 examples of pairs.jsonl"."""
    total = total_examples(data)
    if data.source is Source.synthetic:
        return f"{data.size:,} generated examples (data=synthetic)"
    paths = data.path if isinstance(data.path, list) else [data.path]
    place = ", ".join(map(str, data.sets if data.path is None else paths))
    if total is None:
        return f"{place}, whose number of examples is not known (data.size)"
    return f"{total:,} examples of {place}"


def _lines(data: DataConfig) -> int | None:
    path = Path(data.path).expanduser() if isinstance(data.path, str) else None
    if path is None or path.suffix not in COUNTED or not path.is_file():
        return None
    if path.stat().st_size > LARGEST:
        return None
    with path.open("rb") as file:
        return sum(1 for _ in file)
