"""Find repeats, near repeats, pairs with their reverse, and prompts on both sides of a split.

Two texts nearly repeat each other if at least ``LEAST_SIMILARITY`` of their distinct pieces of
``PIECE`` characters are in both (the Jaccard index). Candidates come from MinHash signatures in
bands (https://en.wikipedia.org/wiki/MinHash): of the texts with an index of exactly 0.8 about 96 %
become candidates, with 0.9 over 99 %. The index of every candidate is then computed exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.data.records import (
    ASSISTANT_TURN,
    MOST_PLACES,
    Place,
    RawDataset,
    Record,
    find_reversed_pairs,
    fingerprint,
    prompt_key,
)
from rlhf.data.splits import PhaseData
from rlhf.data.stored import facts_of, join, mark_firsts, number_groups, take

LEAST_SIMILARITY = 0.8
PIECE = 5  # characters of a piece of text
BANDS, ROWS = 6, 4  # a signature has 6 bands of 4 rows; candidates share all rows of a band
MOST_COMPARED = 100_000  # most prompts compared for near repeats, and most examples checked
MIXERS = np.random.default_rng(0).integers(2**62, size=BANDS * ROWS, dtype=np.uint64) * 2 + 1
POWERS = MIXERS[-1] ** np.arange(PIECE, dtype=np.uint64)  # modulo 2**64

Match = tuple[Record, Record]
FINDING_TEXTS: Mapping[str, Mapping[str, Any]] = read_yaml_beside(__file__, "finding_texts.yaml")


@dataclass(frozen=True)
class DataFinding:
    """Something in the data to look at: ``count`` cases, and the ``places`` of the first few."""

    kind: str
    count: int
    text: str
    places: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the finding as one line."""
        shown, last_file = [], ""
        for place in self.places:
            file, _, row = place.partition(", row ")
            shown.append(f"row {row}" if row and file == last_file else place)
            last_file = file
        if shown and self.count > len(shown):
            shown.append(f"and {self.count - len(shown):,} more")
        return self.text + (f" ({'; '.join(shown)})" if shown else "")


def find_repeats(
    datasets: Sequence[RawDataset], parts: Sequence[PhaseData]
) -> Iterator[DataFinding]:
    """Yield findings about the repeats in ``datasets``.

    ``parts`` are the same records, divided over the phases of a run; [] if a run would refuse them.
    """
    train = join([dataset.train for dataset in datasets])
    held_out = join([dataset.eval or [] for dataset in datasets])
    everything = join([train, held_out])
    matches_by_kind = {"both_sides": _find_common_prompts(train, held_out)}
    if parts:
        train = join([part.train for part in parts])
        held_out = join([part.eval for part in parts])
    row_of = {key.tobytes(): index for index, key in enumerate(facts_of(held_out, "prompt_key"))}
    begun = {
        key: (held_out[row_of[key]], record)
        for record in train
        for key in _earlier_keys(record)
        if key in row_of
    }
    matches_by_kind["begun"] = list(begun.values())
    reverses = find_reversed_pairs(everything)
    matches_by_kind["reversed"] = [(everything[a], everything[b]) for a, b in reverses]
    matches_by_kind["contradictory"] = list(_find_contradictions(everything))
    is_new = mark_firsts(facts_of(everything, "prompt_key"))
    prompts = list(take(everything, np.flatnonzero(is_new)[:MOST_COMPARED]))
    near = find_near_repeats([record.prompt or record.text or "" for record in prompts])
    matches_by_kind["near"] = [(prompts[earlier], prompts[index]) for index, earlier in near]
    matches_by_kind["near_across"] = [
        (one, other)
        for one, other in matches_by_kind["near"]
        if (prompt_key(one) in row_of) != (prompt_key(other) in row_of)
    ]
    for kind, matches in matches_by_kind.items():
        if matches:
            figures = {"compared": len(prompts), "similarity": LEAST_SIMILARITY}
            text = f"{len(matches):,} {FINDING_TEXTS['matches'][kind].format_map(figures)}"
            places = [_name_match(*match) for match in matches[:MOST_PLACES]]
            yield DataFinding(kind, len(matches), text, places)
    repeats = np.flatnonzero(~mark_firsts(facts_of(everything, "example_key")))
    if len(repeats):
        text = f"{len(repeats):,} used examples repeat an earlier one"
        places = [describe_place(everything[int(row)]) for row in repeats[:MOST_PLACES]]
        yield DataFinding("repeated", len(repeats), text, places)


def _find_common_prompts(train: Sequence[Record], held_out: Sequence[Record]) -> list[Match]:
    """Return, for each prompt on both sides, the first record with this prompt on each side."""
    keys = [facts_of(side, "prompt_key") for side in (train, held_out)]
    numbers = number_groups(np.concatenate(keys))
    sides = numbers[: len(train)], numbers[len(train) :]
    _, in_train, in_held_out = np.intersect1d(*sides, return_indices=True)
    return [(train[int(a)], held_out[int(b)]) for a, b in zip(in_train, in_held_out, strict=True)]


def _earlier_keys(record: Record) -> Iterator[bytes]:
    """Yield the keys of a conversation's earlier prompts: the text before each earlier answer."""
    *turns, _ = (record.prompt or "").split(ASSISTANT_TURN)
    for end in range(1, len(turns)):
        yield fingerprint(ASSISTANT_TURN.join(turns[:end]) + ASSISTANT_TURN)


def _find_contradictions(records: Iterable[Record]) -> Iterator[Match]:
    """Yield the first occurrence of a graded response with each later one of another grade."""
    first_by_key: dict[bytes, Record] = {}
    for record in records:
        if record.grade is not None:
            earlier = first_by_key.setdefault(fingerprint(*record.texts), record)
            if earlier.grade != record.grade:
                yield earlier, record


def describe_place(record: Record) -> str:
    """Return the file and the row of a record, or the beginning of a generated record's prompt."""
    if record.place is None:
        return repr((record.prompt or record.text or "")[:60])
    return format_place(record.place)


def format_place(place: Place) -> str:
    """Return the file name and the row number as text."""
    return f"{Path(place[0]).name}, row {place[1]}"


def _name_match(one: Record, other: Record) -> str:
    second = describe_place(other)
    if one.place and other.place and one.place[0] == other.place[0]:
        second = f"row {other.place[1]}"
    return f"{describe_place(one)} and {second}"


def report_records(kind: str, records: Sequence[Record], text: str) -> Iterator[DataFinding]:
    """Yield a finding about ``records``, if there are any, with the places of the first few."""
    if records:
        places = [describe_place(record) for record in records[:MOST_PLACES]]
        yield DataFinding(kind, len(records), f"{len(records):,} {text}", places)


def find_near_repeats(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return (index, earlier index) of each text that nearly repeats an earlier text.

    The earlier text is the first with the same rows in a band. Each index is paired at most once.
    """
    plain = [" ".join(text.split()).casefold().ljust(PIECE) for text in texts]
    signatures = [_compute_signature(text) for text in plain]
    earlier_of: dict[int, int] = {}
    for start in range(0, BANDS * ROWS, ROWS):
        first_of_band: dict[bytes, int] = {}
        for index, signature in enumerate(signatures):
            earlier = first_of_band.setdefault(signature[start : start + ROWS].tobytes(), index)
            is_candidate = earlier != index and index not in earlier_of
            if is_candidate and _jaccard(plain[index], plain[earlier]) >= LEAST_SIMILARITY:
                earlier_of[index] = earlier
    return sorted(earlier_of.items())


def _jaccard(one: str, other: str) -> float:
    """Return the share of the distinct pieces of two texts that are in both."""
    a, b = ({text[n : n + PIECE] for n in range(len(text) - PIECE + 1)} for text in (one, other))
    return len(a & b) / len(a | b)


def _compute_signature(text: str) -> NDArray[np.uint64]:
    """Return the MinHash signature (BANDS * ROWS,) of a text: minima of its hashed pieces."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    hashes = np.convolve(codes, POWERS, "valid")
    hashes = (hashes ^ (hashes >> np.uint64(29))) * MIXERS[-2]
    hashes ^= hashes >> np.uint64(32)
    signature: NDArray[np.uint64] = (hashes * MIXERS[:, None]).min(axis=1)
    return signature
