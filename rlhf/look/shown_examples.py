"""Encode examples as a phase does, and render some with the tokens marked that are learned."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING, NamedTuple

from rlhf.config.choices import LossOn, Phase
from rlhf.config.schema.run import RunConfig
from rlhf.data.encoding import Encoder
from rlhf.data.records import Record
from rlhf.data.tokens import COLUMNS_OF, Columns, Limit, find_example_kind, find_token_limit
from rlhf.look.repeats import describe_place

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_EXAMPLES = 2000  # maximum of a phase that are encoded, or whose texts train a tokenizer
NO_LIMIT = Limit("", 2**62)


@dataclass(frozen=True)
class Span:
    """Consecutive tokens as text, which the phase learns, or only reads."""

    text: str
    is_learned: bool


@dataclass(frozen=True)
class ShownExample:
    """One sequence of tokens that a phase gets."""

    title: str
    place: str
    tokens: int
    spans: list[Span]


TokensOfRow = tuple[int, int]  # a number of tokens, and the index of its record


class EncodedSample(NamedTuple):
    """Examples of a phase as token ids without a limit; column ``row`` is an index of records."""

    phase: Phase
    records: Sequence[Record]
    columns: Columns
    skipped: dict[str, int]
    """Records of the sample that the phase cannot use, by reason."""

    @property
    def lengths(self) -> list[TokensOfRow]:
        """Return the length and row of each sequence, or of the longer sequence of each pair."""
        columns = self.columns
        tokens = map(len, columns["ids"]) if self.phase is Phase.ppo else columns["length"]
        return list(zip(tokens, columns["row"], strict=True))

    @property
    def answers(self) -> list[TokensOfRow]:
        """Return the length and row of each answer that SFT learns."""
        found = []
        for number, (length, row) in enumerate(self.lengths):
            spans = self.columns["observed"][number] if "observed" in self.columns else []
            ends = [self.columns["prompt_tokens"][number], *chain(*spans), length]
            found += [(end - start, row) for start, end in zip(ends[::2], ends[1::2], strict=True)]
        return found


def encode_sample(
    phase: Phase, records: Sequence[Record], encoder: Encoder, config: RunConfig
) -> EncodedSample:
    """Encode ``records`` for ``phase``: all, or a random sample that is the same each time."""
    sample = records
    if len(records) > MOST_EXAMPLES:
        sample = random.Random(f"look-{phase}").sample(records, MOST_EXAMPLES)
    convert = COLUMNS_OF[find_example_kind(phase, config)]
    columns, left_out = convert(list(enumerate(sample)), encoder, NO_LIMIT)
    skipped = {reason: count for reason, count in left_out.items() if count}
    return EncodedSample(phase, sample, columns, skipped)


def show_examples(
    samples: Sequence[EncodedSample],
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    config: RunConfig,
) -> list[ShownExample]:
    """Return the sequences that each phase gets of three examples within the limits.

    All phases show the same examples if they can use them. A sequence that an earlier phase has
    shown, or a prompt of PPO that is the beginning of one, is not shown again.
    """
    picked: list[Record] = []
    shown: dict[tuple[int, ...], ShownExample] = {}
    for sample in samples:
        phase, convert = sample.phase, COLUMNS_OF[find_example_kind(sample.phase, config)]
        again = [record for record in picked if convert([(0, record)], encoder, NO_LIMIT)[0]["row"]]
        records = again or _pick_by_length(sample, find_token_limit(phase, config).tokens)
        picked += [] if again else records
        columns = convert(list(enumerate(records)), encoder, NO_LIMIT)[0]
        learns_prompt = phase is Phase.sft and config.sft.loss_on is LossOn.all
        for title, row, ids, is_learned in _sequences(phase, columns, learns_prompt):
            if not any(known[: len(ids)] == tuple(ids) for known in shown):
                spans = _join_spans(ids, is_learned, tokenizer)
                place = describe_place(records[row])
                shown[tuple(ids)] = ShownExample(title, place, len(ids), spans)
    order = [describe_place(record) for record in picked]
    return sorted(shown.values(), key=lambda example: order.index(example.place))


def _pick_by_length(sample: EncodedSample, limit: int) -> list[Record]:
    """Return the shortest, a middle and the longest example of at most ``limit`` tokens."""
    rows = (row for length, row in sorted(sample.lengths) if length <= limit)
    fitting = list(dict.fromkeys(rows))
    places = {0, len(fitting) // 2, len(fitting) - 1} if fitting else ()
    return [sample.records[fitting[place]] for place in sorted(places)]


def shorten_middle(text: str, most: int) -> str:
    """Return ``text`` without its middle if it has over ``most`` characters."""
    cut, half = len(text) - most, most // 2
    return text if cut <= 0 else f"{text[:half]} ... ({cut:,} characters) ... {text[-half:]}"


def _sequences(
    phase: Phase, columns: Columns, learns_prompt: bool
) -> Iterator[tuple[str, int, list[int], list[bool]]]:
    """Yield title, row, token ids and learned tokens of the sequences in ``columns``."""
    if phase is Phase.ppo:
        for row, ids in zip(columns["row"], columns["ids"], strict=True):
            yield "ppo answers", row, ids, [False] * len(ids)
        return
    sides = {f"{phase} learns": "ids"}
    if "chosen_ids" in columns:
        sides = {f"{phase} prefers": "chosen_ids", f"{phase} rejects": "rejected_ids"}
    rows = zip(columns["row"], columns["prompt_tokens"], strict=True)
    for number, (row, prompt) in enumerate(rows):
        for title, column in sides.items():
            ids = columns[column][number]
            is_learned = [learns_prompt or place >= prompt for place in range(len(ids))]
            for start, end in columns["observed"][number] if "observed" in columns else ():
                is_learned[start:end] = [learns_prompt] * (end - start)
            grade = f" (grade {columns['grade'][number]:g})" if "grade" in columns else ""
            yield title + grade, row, ids, is_learned


def _join_spans(
    ids: Sequence[int], is_learned: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> list[Span]:
    runs = groupby(zip(ids, is_learned, strict=True), key=lambda pair: pair[1])
    return [Span(tokenizer.decode([i for i, _ in run]), learned) for learned, run in runs]
