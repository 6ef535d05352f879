"""Count the steps, held-out examples and sequence lengths of every phase of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.user_paths import expand_user_path
from rlhf.config.batches import num_phase_steps
from rlhf.config.choices import SPLIT_PHASES, Phase, Source
from rlhf.config.schema.run import RunConfig
from rlhf.options import DataConfig

COUNTED_SUFFIXES = (".jsonl", ".csv")  # file types with one example per line
KNOWN_SIZES: Mapping[str, int] = read_yaml_beside(__file__, "known_sizes.yaml")
ENOUGH = sys.maxsize  # held-out examples: evaluations use as many as their keys allow
LARGEST_COUNTED = 2**30  # bytes; the lines of larger files are not counted


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work of one phase: number of steps, and lengths of its examples, pairs or prompts."""

    steps: int | None
    """Optimizer steps, or PPO steps; None if the examples cannot be counted."""
    lengths: tuple[int, ...]
    """Tokens per sequence (in PPO, per prompt), sorted; every entry is equally likely."""
    held_out: int = 0
    """Held-out examples; ``ENOUGH`` if the data was not read."""
    records: int = 0
    """Examples of all phases, which every process holds in memory; 0 if unknown."""
    answer: float | None = None
    """Expected tokens per PPO response; None: every response has the maximum."""

    @property
    def mean_tokens(self) -> float:
        """Return the mean number of tokens per sequence (PPO: per prompt)."""
        return sum(self.lengths) / len(self.lengths)

    @property
    def longest_length(self) -> int:
        """Return the length of the longest sequence in tokens."""
        return self.lengths[-1]

    def padded_widths(self, passes: int, *, micro: int, is_sorted: bool) -> tuple[int, ...]:
        """Return the padded width of each of ``passes`` micro-batches of ``micro`` sequences.

        The padded width is the expected length of a micro-batch's longest sequence. The sequences
        of a micro-batch have similar lengths if ``is_sorted``, otherwise random lengths.
        """
        share = micro / (micro + 1)  # expected maximum of ``micro`` uniform random numbers
        quantiles = [(i + share) / passes if is_sorted else share for i in range(passes)]
        return tuple(
            self.lengths[min(int(q * len(self.lengths)), len(self.lengths) - 1)] for q in quantiles
        )


Loads = Mapping[Phase, Load]


def assume_loads(config: RunConfig) -> dict[Phase, Load]:
    """Return each phase's load without reading the data: every sequence has its maximum length."""
    longest = {
        Phase.sft: config.sft.max_tokens,
        Phase.reward: config.reward.max_tokens,
        Phase.dpo: config.dpo.max_tokens,
        Phase.ppo: config.rollout.max_prompt_tokens,
    }
    known = {"held_out": ENOUGH, "records": total_examples(config.data) or 0}
    return {
        phase: Load(steps=count_steps(config, phase), lengths=(longest[phase],), **known)
        for phase in config.phase.order
    }


def count_steps(config: RunConfig, phase: Phase) -> int | None:
    """Return the optimizer steps, or PPO steps, of a phase; None if examples cannot be counted."""
    examples = count_examples(config.data, phase)
    if examples is not None:
        return max(1, num_phase_steps(config, phase, examples=examples))
    return config.ppo.steps if phase is Phase.ppo else None


def count_examples(data: DataConfig, phase: Phase) -> int | None:
    """Return the number of training examples of ``phase``, or None if it is unknown."""
    total = total_examples(data)
    if total is None:
        return None
    share = data.split[SPLIT_PHASES.index(phase.phase_in_split)] / sum(data.split)
    # The known hub datasets have separate held-out splits.
    held_out = data.eval_share if data.source is not Source.hub and data.eval_path is None else 0.0
    return int(total * share * (1 - held_out))


def total_examples(data: DataConfig) -> int | None:
    """Return data.size, the lines of a local file or the known rows of hub sets; None: unknown."""
    if data.size:
        return data.size
    if data.source is Source.hub and data.path is None and data.sets:
        sizes = [KNOWN_SIZES.get(each.path, 0) * each.weight for each in data.sets.values()]
        return int(sum(sizes)) if all(sizes) else None
    path = expand_user_path(data.path, key="data.path") if isinstance(data.path, str) else None
    if path is None or path.suffix not in COUNTED_SUFFIXES or not path.is_file():
        return None
    if path.stat().st_size > LARGEST_COUNTED:
        return None
    with path.open("rb") as file:
        return sum(1 for _ in file)


def describe_examples(data: DataConfig, records: int = 0) -> str:
    """Return the number and origin of the examples, such as "9,000 examples of pairs.jsonl".

    ``records`` is the number of examples that were read; 0: the data was not read.
    """
    total = records or total_examples(data)
    if data.source in (Source.synthetic, Source.environment):
        toy = "toy " if data.source is Source.synthetic else ""
        return f"{data.size:,} generated {toy}examples (data={data.source})"
    paths = data.path if isinstance(data.path, list) else [data.path]
    origin = ", ".join(map(str, data.sets if data.path is None else paths))
    if total is None:
        return f"{origin}, whose number of examples is not known (data.size)"
    return f"{total:,} examples of {origin}"
