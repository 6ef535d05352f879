"""Find repeats, near repeats, pairs with their reverse, and prompts on both sides of a split.

Two texts nearly repeat each other if at least ``NEAR`` of their different pieces of ``LETTERS``
letters are in both (the Jaccard index). Candidates come from MinHash signatures in bands
(https://en.wikipedia.org/wiki/MinHash): of the texts with an index of exactly 0.8 about 96 % become
candidates, with 0.9 over 99 %. The index of every candidate is then computed exactly.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlhf.data.records import (
    ASSISTANT_TURN,
    RawDataset,
    Record,
    example_key,
    fingerprint,
    prompt_key,
)
from rlhf.data.splits import PhaseData

NEAR = 0.8
LETTERS = 5
BANDS, ROWS = 6, 4  # of a signature; texts with equal rows of one band are candidates
MOST_COMPARED = 100_000  # prompts that are compared with one another for near repeats
CHUNK = 100_000  # letters that are hashed at a time, so that they fit in the CPU's cache
NAMED_PLACES = 5  # places that a finding names
SCRIPT_LETTERS = 40  # letters of an answer that decide its script
JAPANESE = {"HIRAGANA": "CJK", "KATAKANA": "CJK"}  # scripts that Japanese mixes with CJK
FREQUENT = 3  # examples from which a text in several examples is named
MIXERS = np.random.default_rng(0).integers(2**62, size=BANDS * ROWS, dtype=np.uint64) * 2 + 1

Match = tuple[Record, Record]


@dataclass(frozen=True)
class DataFinding:
    """Something in the data that a person should look at: ``count`` cases, and the first places."""

    kind: str
    count: int
    text: str
    places: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the finding as one line."""
        return self.text + (f" ({'; '.join(self.places)})" if self.places else "")


def find_repeats(
    datasets: Sequence[RawDataset], parts: Sequence[PhaseData]
) -> Iterator[DataFinding]:
    """Yield what ``datasets`` have more than once.

    ``parts`` are the same records as a run's phases get them; [] if a run would refuse them.
    """
    train = [record for dataset in datasets for record in dataset.train]
    held_out = [record for dataset in datasets for record in dataset.eval or ()]
    everything = [*train, *held_out]
    ours, theirs = _by_prompt(train), _by_prompt(held_out)
    yield from _name_matches(
        "both_sides",
        [(ours[key], theirs[key]) for key in ours if key in theirs],
        "prompts stand on both sides of the data's own split; a run trains on none of them",
    )
    if parts:
        train = [record for part in parts for record in part.train]
        theirs = _by_prompt(record for part in parts for record in part.eval)
    begun = {key: (theirs[key], r) for r in train for key in _earlier_keys(r) if key in theirs}
    yield from _name_matches(
        "begun",
        list(begun.values()),
        "held-out prompts begin a longer conversation that is trained on",
    )
    yield from _name_matches(
        "reversed",
        list(_find_reverses(everything)),
        "pairs have their own reverse in the data; both are used, and contradict each other",
    )
    yield from _name_matches(
        "contradictory",
        list(_find_contradictions(everything)),
        "responses are there with another grade too; both are used",
    )
    prompts = dict(islice(_by_prompt(everything).items(), MOST_COMPARED))
    records = list(prompts.values())
    found = find_near_repeats([record.prompt or record.text or "" for record in records])
    near = [(records[earlier], records[index]) for index, earlier in found]
    across = [(a, b) for a, b in near if (prompt_key(a) in theirs) != (prompt_key(b) in theirs)]
    how = f"of {len(records):,} prompts nearly repeat an earlier one (at least {NEAR:.0%} the same)"
    yield from _name_matches("near", near, how)
    yield from _name_matches(
        "near_across", across, "near repeats have one prompt trained on and the other held out"
    )
    repeated = len(everything) - len({example_key(record) for record in everything})
    if repeated:
        yield DataFinding("repeated", repeated, f"{repeated:,} used examples repeat an earlier one")
    for part in ("prompt", "chosen"):
        texts = Counter(" ".join((getattr(r, part) or "").split()) for r in everything)
        del texts[""]
        for text, count in texts.most_common(1):
            if count >= FREQUENT:
                what = f"The most frequent {part} text is in {count:,} examples: {text[:80]!r}"
                yield DataFinding(f"frequent_{part}", count, what)

    scripts = Counter(filter(None, (_script_of(r.chosen or "") for r in everything)))
    if len(scripts) > 1:
        named = ", ".join(f"{script} {count:,}" for script, count in scripts.most_common())
        yield DataFinding("scripts", len(scripts), f"Answers are in several scripts: {named}")


def _script_of(text: str) -> str:
    """Return the script of most of the first letters, as Unicode names it; "" without letters."""
    letters = filter(str.isalpha, text[:SCRIPT_LETTERS])
    names = (unicodedata.name(letter, "UNKNOWN").split()[0] for letter in letters)
    found = Counter(JAPANESE.get(name, name) for name in names)
    return max(found, key=found.__getitem__, default="")


def _by_prompt(records: Iterable[Record]) -> dict[bytes, Record]:
    """Return the first record of each different prompt."""
    found: dict[bytes, Record] = {}
    for record in records:
        found.setdefault(prompt_key(record), record)
    return found


def _earlier_keys(record: Record) -> Iterator[bytes]:
    """Yield the keys of the prompts that the earlier answers of a conversation follow."""
    *turns, _ = (record.prompt or "").split(ASSISTANT_TURN)
    for end in range(1, len(turns)):
        yield fingerprint(ASSISTANT_TURN.join(turns[:end]) + ASSISTANT_TURN)


def _find_reverses(records: Sequence[Record]) -> Iterator[Match]:
    """Yield each pair of responses that is the reverse of an earlier one, after the earlier one."""
    first: dict[bytes, Record] = {}
    for record in records:
        if record.rejected is not None:
            prompt, better, worse, _ = record.texts
            if (earlier := first.get(fingerprint(prompt, worse, better))) is not None:
                yield earlier, record
            first.setdefault(fingerprint(prompt, better, worse), record)


def _find_contradictions(records: Sequence[Record]) -> Iterator[Match]:
    """Yield each graded response that came earlier with another grade, after the earlier one."""
    first: dict[bytes, Record] = {}
    for record in records:
        if record.grade is not None:
            earlier = first.setdefault(fingerprint(*record.texts), record)
            if earlier.grade != record.grade:
                yield earlier, record


def place_text(record: Record) -> str:
    """Return the file and the row of a record, or the beginning of a generated record's prompt."""
    if record.place is None:
        return repr((record.prompt or record.text or "")[:60])
    return f"{Path(record.place[0]).name}, row {record.place[1]}"


def _name_matches(kind: str, matches: Sequence[Match], text: str) -> Iterator[DataFinding]:
    """Yield a finding of ``matches`` with its first places, if there are any matches."""
    places = []
    for one, other in matches[:NAMED_PLACES]:
        second = place_text(other)
        if one.place and other.place and one.place[0] == other.place[0]:
            second = f"row {other.place[1]}"
        places.append(f"{place_text(one)} and {second}")
    if matches:
        yield DataFinding(kind, len(matches), f"{len(matches):,} {text}", places)


def find_near_repeats(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return (index, earlier index) of each text that nearly repeats an earlier text.

    The earlier text is the first of its band; every index is paired at most once, in order.
    """
    plain = [" ".join(text.split()).casefold().ljust(LETTERS) for text in texts]
    signatures = np.concatenate([*_signatures(plain), np.zeros((0, BANDS * ROWS), np.uint64)])
    found: dict[int, int] = {}
    for band in range(BANDS):
        rows = signatures[:, band * ROWS : (band + 1) * ROWS]
        for index, earlier in _equal_rows(rows):
            if index not in found and _jaccard(plain[index], plain[earlier]) >= NEAR:
                found[index] = earlier
    return sorted(found.items())


def _pieces(text: str) -> set[str]:
    return {text[start : start + LETTERS] for start in range(len(text) - LETTERS + 1)}


def _jaccard(one: str, other: str) -> float:
    a, b = _pieces(one), _pieces(other)
    return len(a & b) / len(a | b)


def _equal_rows(rows_NR: NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
    """Yield (index, first index) of each row that equals an earlier row."""
    keys_N = (rows_NR * MIXERS[:ROWS]).sum(axis=1)
    _, first, group_N = np.unique(keys_N, return_index=True, return_inverse=True)
    earlier_N = first[group_N]
    for index in np.flatnonzero(earlier_N != np.arange(len(keys_N))):
        yield int(index), int(earlier_N[index])


def _signatures(texts: Sequence[str]) -> Iterator[NDArray[np.uint64]]:
    """Yield the signatures (texts, BANDS * ROWS) of chunks of texts: minima of hashed pieces."""
    begin, letters = 0, 0
    for index, text in enumerate(texts, 1):
        letters += len(text)
        if letters >= CHUNK or index == len(texts):
            yield _signatures_of_chunk(texts[begin:index])
            begin, letters = index, 0


def _signatures_of_chunk(texts: Sequence[str]) -> NDArray[np.uint64]:
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    codes = np.concatenate([codes, np.zeros(LETTERS, np.uint32)]).astype(np.uint64)
    lengths = np.array([len(text) for text in texts])
    starts = np.concatenate([[0], lengths.cumsum()[:-1]])
    total = len(codes) - LETTERS
    hashes = np.zeros(total, np.uint64)
    for place in range(LETTERS):
        hashes = hashes * MIXERS[-1] + codes[place : place + total]
    hashes = (hashes ^ (hashes >> np.uint64(29))) * MIXERS[-2]
    hashes ^= hashes >> np.uint64(32)
    # A piece that begins in the last letters of a text continues in the next text: drop it.
    whole = np.flatnonzero(np.repeat(starts + lengths, lengths) - np.arange(total) >= LETTERS)
    begins = np.searchsorted(whole, starts)
    return np.stack(
        [np.minimum.reduceat(hashes[whole] * mixer, begins) for mixer in MIXERS], axis=1
    )
