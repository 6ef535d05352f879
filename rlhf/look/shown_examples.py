"""Encode examples as a phase does, and show some of them with marks on the learned tokens."""

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

MOST_EXAMPLES = 2000  # most examples per phase that are encoded, or that train a tokenizer
NO_LIMIT = Limit("", 2**62)


@dataclass(frozen=True)
class Span:
    """Consecutive tokens as text: the phase learns all of them, or only reads them."""

    text: str
    is_learned: bool


@dataclass(frozen=True)
class ShownExample:
    """One sequence that a phase gets: its title, file and row, number of tokens, and text."""

    title: str
    place: str
    tokens: int
    spans: list[Span]


TokensOfRow = tuple[int, int]  # number of tokens, index of the record


class EncodedSample(NamedTuple):
    """Examples of a phase as token ids without a limit; column ``row`` indexes ``records``."""

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
        sizes = []
        for index, (length, row) in enumerate(self.lengths):
            spans = self.columns["observed"][index] if "observed" in self.columns else []
            ends = [self.columns["prompt_tokens"][index], *chain(*spans), length]
            sizes += [(end - start, row) for start, end in zip(ends[::2], ends[1::2], strict=True)]
        return sizes


def encode_sample(
    phase: Phase, records: Sequence[Record], encoder: Encoder, config: RunConfig
) -> EncodedSample:
    """Encode ``records`` for ``phase``; of very many, a random sample that is always the same."""
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
    """Return the sequences that each phase makes of up to three examples within its limit.

    All phases show the same examples if they can use them. A sequence is not shown again, nor is
    the beginning of a shown sequence, such as a prompt of PPO.
    """
    picked: list[Record] = []
    shown: dict[tuple[int, ...], ShownExample] = {}
    for sample in samples:
        phase, convert = sample.phase, COLUMNS_OF[find_example_kind(sample.phase, config)]
        usable = [r for r in picked if convert([(0, r)], encoder, NO_LIMIT)[0]["row"]]
        records = usable or _pick_by_length(sample, find_token_limit(phase, config).tokens)
        picked += [] if usable else records
        columns = convert(list(enumerate(records)), encoder, NO_LIMIT)[0]
        learns_prompt = phase is Phase.sft and config.sft.loss_on is LossOn.all
        for title, row, ids, is_learned in _list_sequences(phase, columns, learns_prompt):
            if not any(known[: len(ids)] == tuple(ids) for known in shown):
                spans = _join_spans(ids, is_learned, tokenizer)
                place = describe_place(records[row])
                shown[tuple(ids)] = ShownExample(title, place, len(ids), spans)
    order = [describe_place(record) for record in picked]
    return sorted(shown.values(), key=lambda example: order.index(example.place))


def _pick_by_length(sample: EncodedSample, limit: int) -> list[Record]:
    """Return the shortest, the median and the longest example of at most ``limit`` tokens."""
    rows = (row for length, row in sorted(sample.lengths) if length <= limit)
    fitting = list(dict.fromkeys(rows))
    ranks = {0, len(fitting) // 2, len(fitting) - 1} if fitting else ()
    return [sample.records[fitting[rank]] for rank in sorted(ranks)]


def shorten_middle(text: str, most: int) -> str:
    """Return ``text``, with a note instead of its middle if it has over ``most`` characters."""
    cut, half = len(text) - most, most // 2
    return text if cut <= 0 else f"{text[:half]} ... ({cut:,} characters) ... {text[-half:]}"


def _list_sequences(
    phase: Phase, columns: Columns, learns_prompt: bool
) -> Iterator[tuple[str, int, list[int], list[bool]]]:
    """Yield title, row, token ids and flags of learned tokens of each sequence in ``columns``."""
    if phase is Phase.ppo:
        for row, ids in zip(columns["row"], columns["ids"], strict=True):
            yield "ppo answers", row, ids, [False] * len(ids)
        return
    sides = {f"{phase} learns": "ids"}
    if "chosen_ids" in columns:
        sides = {f"{phase} prefers": "chosen_ids", f"{phase} rejects": "rejected_ids"}
    rows = zip(columns["row"], columns["prompt_tokens"], strict=True)
    for index, (row, prompt_tokens) in enumerate(rows):
        for title, column in sides.items():
            ids = columns[column][index]
            is_learned = [learns_prompt or i >= prompt_tokens for i in range(len(ids))]
            for start, end in columns["observed"][index] if "observed" in columns else ():
                is_learned[start:end] = [learns_prompt] * (end - start)
            grade = f" (grade {columns['grade'][index]:g})" if "grade" in columns else ""
            yield title + grade, row, ids, is_learned


def _join_spans(
    ids: Sequence[int], is_learned: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> list[Span]:
    runs = groupby(zip(ids, is_learned, strict=True), key=lambda pair: pair[1])
    return [Span(tokenizer.decode([i for i, _ in run]), learned) for learned, run in runs]
