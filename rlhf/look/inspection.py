"""Read the data of a configuration as a run does, and measure it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.base.errors import ConfigError, DataError
from rlhf.config.choices import Phase, Source
from rlhf.config.roles import tokenizer_base
from rlhf.config.schema.run import RunConfig
from rlhf.data.encoding import Encoder
from rlhf.data.phase_needs import PhaseExamples, require_examples
from rlhf.data.records import MOST_PLACES, RawDataset, Record
from rlhf.data.splits import PhaseData
from rlhf.data.stored import join
from rlhf.data.tokens import Limit, find_token_limit
from rlhf.look.odd_responses import find_odd_responses
from rlhf.look.repeats import (
    MOST_COMPARED,
    DataFinding,
    describe_place,
    find_repeats,
    format_place,
    report_records,
)
from rlhf.look.shown_examples import (
    MOST_EXAMPLES,
    EncodedSample,
    ShownExample,
    TokensOfRow,
    encode_sample,
    show_examples,
)
from rlhf.models.sources import RUN_FOLDER
from rlhf.models.tokenizers import load_or_train_tokenizer, load_tokenizer, tokenizer_place
from rlhf.runtime.run_data import divide_datasets, read_datasets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEPT_SHARE = 0.99  # share of the sequences that a proposed limit keeps
NUM_BARS = 20  # of a histogram of lengths
FEWEST_PAIRS = 20  # with fewer pairs, the lengths of responses mean little
LOPSIDED = 0.8  # least share of pairs with the same longer side that is reported


@dataclass(frozen=True)
class Lengths:
    """Tokens of a phase's sequences, or of the answers in the data, beside their limit."""

    title: str
    key: str
    limit: int
    measured: int
    """Sequences that were measured: all sequences, or a sample of them."""
    over: int
    """Measured sequences that are longer than the limit."""
    over_rows: int
    """Rows with sequences that are longer than the limit."""
    over_places: list[str]
    """File and row number of the first of these rows."""
    shortest: int
    median: int
    longest: int
    keeps_99: str
    """The limit that keeps 99 % of the sequences, as an override; "" if ``limit`` keeps them."""
    bars: list[tuple[int, int]]
    """A histogram: each bar's fewest tokens and number of sequences; the last bar has no end."""

    def __str__(self) -> str:
        """Return the lengths and the limit as one line."""
        return (
            f"{self.title}: {self.shortest:,} to {self.longest:,} tokens, median {self.median:,}; "
            f"limit {self.key}={self.limit}, longer: {self.over:,} of {self.measured:,}"
        )


@dataclass(frozen=True)
class Look:
    """The results of inspecting data; ``lines`` are what a run prints about the data."""

    lines: list[str]
    datasets: list[dict[str, object]]
    tokenizer: str
    template: str
    lengths: list[Lengths]
    findings: list[DataFinding]
    examples: list[ShownExample]


def inspect_data(config: RunConfig, command: str) -> Look:
    """Read the data of ``config`` as a run does, and measure it; ``command`` would start the run.

    Raises:
        RlhfError: if no row can be used, or the tokenizer cannot be loaded.
    """
    if config.data.source is Source.environment:
        raise ConfigError("data=environment: has episodes that a run plays, and no rows to look at")
    lines: list[str] = []
    datasets = read_datasets(config, lines.append)
    parts: Mapping[Phase, PhaseData] = {}
    findings = []
    try:
        parts = divide_datasets(datasets, config, lines.append)
    except DataError as error:
        findings.append(DataFinding("refused", 1, f"`{command}` would be refused: {error}"))
    tokenizer = _load_tokenizer(config, datasets, parts)
    encoder = Encoder(tokenizer, config.data.template)
    samples = [
        encode_sample(phase, _records_for(phase, datasets), encoder, config)
        for phase in config.phase.order
    ]
    counts = {
        phase: PhaseExamples(len(part.train), len(part.eval), {}, len(part.eval))
        for phase, part in parts.items()
        if phase in config.phase.order
    } | {
        sample.phase: PhaseExamples(0, 0, sample.skipped, 0)
        for sample in samples
        if sample.records and not sample.lengths
    }
    try:
        require_examples(config, {} if findings else counts)
    except DataError as error:
        findings.append(DataFinding("refused", 1, f"`{command}` would be refused: {error}"))
    lengths = list(chain.from_iterable(_measure(sample, config) for sample in samples))
    everything = join([side for data in datasets for side in (data.train, data.eval or [])])
    compared = everything[:MOST_COMPARED]
    findings += [
        *(finding for dataset in datasets for finding in _find_in_dataset(dataset)),
        *(finding for sample in samples for finding in _find_unusable(sample)),
        *(finding for each in lengths for finding in _find_too_long(each)),
        *_find_unanswered(compared),
        *find_odd_responses(compared),
        *find_repeats(datasets, list(parts.values())),
    ]
    return Look(
        lines,
        [_count_records(dataset) for dataset in datasets],
        tokenizer_place(tokenizer_base(config)[1], key="")[1] or "trained on this data",
        config.data.template.value,
        lengths,
        findings,
        show_examples(samples, encoder, tokenizer, config),
    )


def _load_tokenizer(
    config: RunConfig, datasets: Sequence[RawDataset], parts: Mapping[Phase, PhaseData]
) -> PreTrainedTokenizerBase:
    """Return the run's tokenizer; if the run trains it, train it on a sample of the same texts."""
    if config.from_run is not None:
        return load_tokenizer(Path(config.from_run) / "tokenizer", key=RUN_FOLDER)
    sides = [part.train for part in parts.values()] or [dataset.train for dataset in datasets]
    records = (record for side in sides for record in islice(side, MOST_EXAMPLES))
    texts = (text for record in records for text in record.all_texts if text)
    key, model = tokenizer_base(config)
    return load_or_train_tokenizer(model, key=key, texts=texts)


def _records_for(phase: Phase, datasets: Sequence[RawDataset]) -> Sequence[Record]:
    split_phase = phase.phase_in_split
    used = [data for data in datasets if data.phases is None or split_phase in data.phases]
    return join([side for data in used for side in (data.train, data.eval or [])])


def _count_records(dataset: RawDataset) -> dict[str, object]:
    """Return the fields of a data set, with numbers of records instead of the records."""
    held_out = None if dataset.eval is None else len(dataset.eval)
    counts = {"train": len(dataset.train), "eval": held_out, "left_out": dict(+dataset.left_out)}
    return dataset._asdict() | counts


def _find_in_dataset(dataset: RawDataset) -> Iterator[DataFinding]:
    name = dataset.name
    for kind, rows in (("dropped", dataset.left_out), ("conflict", dataset.conflicts)):
        for reason, count in rows.most_common():
            text = f"Of {name}, {count:,} {reason}"
            if kind == "dropped":
                text = f"Not used of {name}, {count:,} times: {reason}"
            places = [format_place(place) for place in rows.places.get(reason, [])]
            yield DataFinding(kind, count, text, places)
    if dataset.unread:
        shown = (
            f"{name} ({dataset.varied.get(name, 'always the same')})" for name in dataset.unread
        )
        text = f"{dataset.name}: not read: {', '.join(shown)}"
        yield DataFinding("unread", len(dataset.unread), text)
    yield from _find_lopsided_pairs(dataset)


def _find_lopsided_pairs(dataset: RawDataset) -> Iterator[DataFinding]:
    """Yield a finding if the chosen responses of nearly all pairs are longer, or shorter."""
    first = dataset.train[:MOST_COMPARED]
    pairs = [(r.chosen, r.rejected) for r in first if r.chosen and r.rejected]
    counts = {
        "longer": sum(len(better) > len(worse) for better, worse in pairs),
        "shorter": sum(len(better) < len(worse) for better, worse in pairs),
    }
    for which, count in counts.items():
        if len(pairs) >= FEWEST_PAIRS and count >= LOPSIDED * len(pairs):
            what = f"the {which} one in {count:,} of {len(pairs):,} pairs of {dataset.name}"
            text = f"The chosen response is {what}: a reward model can learn length instead"
            yield DataFinding("lopsided", count, text)


def _find_unanswered(records: Sequence[Record]) -> Iterator[DataFinding]:
    unanswered = [r for r in records if r.chosen is None and r.text is None]
    if len(unanswered) < len(records):
        text = "examples have no response, or end with the user: only PPO uses them, as prompts"
        yield from report_records("unanswered", unanswered, text)


def _find_unusable(sample: EncodedSample) -> Iterator[DataFinding]:
    for reason, count in sample.skipped.items() if sample.lengths else ():
        start = f"Of {len(sample.records):,} examples the {sample.phase} phase cannot use"
        used = set(sample.columns["row"])
        places = [describe_place(r) for row, r in enumerate(sample.records) if row not in used]
        is_only = len(places) == count  # no other reason, and each example has one sequence
        first = places[:MOST_PLACES] if is_only else []
        why = reason.partition(" (first: ")[0] if first else reason
        yield DataFinding("unusable", count, f"{start} {count:,}: {why}", first)


def _find_too_long(lengths: Lengths) -> Iterator[DataFinding]:
    if lengths.over:
        keeps = f"; {lengths.keeps_99} keeps 99 %" if lengths.keeps_99 else ""
        count = f"{lengths.over:,} of {lengths.measured:,} {lengths.title}"
        text = f"{count} are longer than {lengths.key}={lengths.limit}{keeps}"
        yield DataFinding("too_long", lengths.over_rows, text, lengths.over_places)


def _measure(sample: EncodedSample, config: RunConfig) -> Iterator[Lengths]:
    """Yield the lengths of a phase's sequences; for SFT before PPO or DPO also of the answers."""
    phase, order = sample.phase, config.phase.order
    title = f"{phase} {'prompts' if phase is Phase.ppo else 'examples'}"
    if sample.lengths:
        limit = find_token_limit(phase, config)
        yield _summarise(title, limit, sample.lengths, sample.records)
    if sample.lengths and phase is Phase.sft and (Phase.ppo in order or Phase.dpo in order):
        limit = Limit("rollout.max_response_tokens", config.rollout.max_response_tokens)
        yield _summarise("the data's own answers", limit, sample.answers, sample.records)


def _summarise(
    title: str, limit: Limit, lengths: Sequence[TokensOfRow], records: Sequence[Record]
) -> Lengths:
    tokens = sorted(length for length, _ in lengths)
    over = [row for length, row in lengths if length > limit.tokens]
    rows = list(dict.fromkeys(over))
    enough = tokens[math.ceil(KEPT_SHARE * len(tokens)) - 1]
    return Lengths(
        title,
        limit.key,
        limit.tokens,
        len(tokens),
        len(over),
        len(rows),
        [describe_place(records[row]) for row in rows[:MOST_PLACES]],
        tokens[0],
        tokens[len(tokens) // 2],
        tokens[-1],
        f"{limit.key}={enough}" if enough > limit.tokens else "",
        _count_bars(tokens, limit.tokens, top=math.ceil(1.25 * enough)),
    )


def _count_bars(lengths: Sequence[int], limit: int, top: int) -> list[tuple[int, int]]:
    """Return a histogram of bars of equal width up to ``top``, one of which ends at the limit."""
    width = max(1, math.ceil(top / NUM_BARS))
    first = (limit + 1) % width if limit < top else 0
    counts = Counter(max(0, (min(n, top) - first) // width + 1) for n in lengths)
    return [(max(0, first + (n - 1) * width), counts[n]) for n in range(max(counts) + 1)]
