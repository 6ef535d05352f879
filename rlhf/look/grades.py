"""Find grades that other responses contradict, and show some grades for a person to check.

No rule here knows a right answer: a finding names the responses that contradict one another, or
the words in which a response is like those with another mark.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from statistics import quantiles
from typing import NamedTuple

from rlhf.data.records import Record, normalize_text, prompt_key
from rlhf.look.odd_responses import request_of
from rlhf.look.repeats import (
    NEAR,
    DataFinding,
    jaccard,
    name_matches,
    name_records,
    place_text,
)
from rlhf.look.shown_examples import shorten_middle

MOST_RIVALS = 20  # marked responses to a prompt that are compared with one another
MOST_JUDGED = 10_000  # marks that are compared by words
WORD = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|\w+")
FEWEST = 3  # other responses with a word, from which the word counts
WORDS = 10  # most telling words of a response that count
TELLING = 0.9  # share of marks that words predict, from which the exceptions are named
DOUBT = math.log(20)  # odds against a mark from which it is named
SHOWN_WORDS = 3
FENCE = 3  # distances of the quartiles beyond which a score is named
SAMPLES = 10  # responses of each mark that are shown
LETTERS_SHOWN = 100
NAMES = {True: "good", False: "bad"}


class Unit(NamedTuple):
    """A marked response, or a pair, whose chosen response counts as good."""

    record: Record
    words: Mapping[bool, frozenset[str]]
    """The words of the good response (True) and of the bad one, if they are there.

    Of a pair, words that both responses have count nowhere.
    """


@dataclass(frozen=True)
class GradedSample:
    """A response, shortened, for a person to check its grade."""

    grade: str
    place: str
    prompt: str
    response: str


def find_doubtful_marks(records: Sequence[Record]) -> Iterator[DataFinding]:
    """Yield marks, and choices of pairs, that other responses contradict."""
    yield from _find_near_contradictions(records)
    yield from _find_outlying_scores(records)
    kinds = {
        True: "responses marked good have the words of those marked bad",
        False: "responses marked bad have the words of those marked good",
        None: "pairs may be swapped: the chosen responses have the words of rejected ones",
    }
    doubts = judge_by_words(records)
    for grade, text in kinds.items():
        found = [(record, word) for record, word in doubts if record.grade is grade]
        words = "; ".join(islice(dict.fromkeys(word for _, word in found), SHOWN_WORDS))
        yield from name_records("doubtful", [record for record, _ in found], f"{text} ({words})")


def _find_near_contradictions(records: Sequence[Record]) -> Iterator[DataFinding]:
    rivals: defaultdict[bytes, list[Record]] = defaultdict(list)
    for record in records:
        if isinstance(record.grade, bool):
            rivals[prompt_key(record)].append(record)
    found = [
        (one, other)
        for same in rivals.values()
        for one, other in combinations(same[:MOST_RIVALS], 2)
        if one.grade is not other.grade and _are_near(one.chosen or "", other.chosen or "")
    ]
    yield from name_matches(
        "near_contradictory",
        found,
        "responses nearly repeat one to the same prompt that is marked otherwise",
    )


def _are_near(one: str, other: str) -> bool:
    """Return True if the texts nearly repeat each other; False if they are equal."""
    return NEAR <= jaccard(normalize_text(one), normalize_text(other)) < 1


def judge_by_words(records: Sequence[Record]) -> list[tuple[Record, str]]:
    """Return the records whose marks their words contradict, each with its most telling word.

    The odds of a mark are those of naive Bayes on whole words, by all other records. They are
    evidence only if they agree with nearly all marks (``TELLING``); otherwise nothing is returned.
    """
    units = [*islice(_units_of(records), MOST_JUDGED)]
    sides = [(mark, words) for unit in units for mark, words in unit.words.items()]
    totals = Counter(mark for mark, _ in sides)
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for mark, words in sides:
        counts[mark].update(words)
    if min(totals[True], totals[False]) < FEWEST:
        return []
    doubts = []
    right = 0
    for unit in units:
        odds = _find_odds(unit, counts, totals)
        total = sum(each for each, _ in odds)
        right += total > 0
        if total < -DOUBT:
            word = min(odds)[1]
            told = f"{word!r}: {counts[True][word]:,} good, {counts[False][word]:,} bad"
            doubts.append((unit.record, told))
    return doubts if right >= TELLING * len(units) else []


def _units_of(records: Sequence[Record]) -> Iterator[Unit]:
    for record in records:
        texts = (normalize_text(text or "") for text in (record.chosen, record.rejected))
        better, worse = (frozenset(WORD.findall(text)) for text in texts)
        if record.rejected is not None:
            yield Unit(record, {True: better - worse, False: worse - better})
        elif isinstance(record.grade, bool):
            yield Unit(record, {record.grade: better})


def _find_odds(
    unit: Unit, counts: Mapping[bool, Counter[str]], totals: Mapping[bool, int]
) -> list[tuple[float, str]]:
    """Return the log odds for the marks of a unit by its most telling words, with each word."""
    found = []
    others = {mark: totals[mark] - (mark in unit.words) for mark in (True, False)}
    for mark, words in unit.words.items():
        for word in words:
            same, opposite = counts[mark][word] - 1, counts[not mark][word]
            if same + opposite >= FEWEST:
                odds = (same + 0.5) / (others[mark] + 1)
                odds /= (opposite + 0.5) / (others[not mark] + 1)
                found.append((math.log(odds), word))
    return sorted(found, key=lambda each: -abs(each[0]))[:WORDS]


def _find_outlying_scores(records: Sequence[Record]) -> Iterator[DataFinding]:
    """Yield the scores beyond Tukey's outer fences: 3 times the quartiles' distance from them."""
    scored = [(r, r.grade) for r in records if isinstance(r.grade, float)]
    low, _, high = quantiles([score for _, score in scored], n=4) if scored[1:] else (0, 0, 0)
    fence = FENCE * (high - low)
    found = [r for r, score in scored if not low - fence <= score <= high + fence]
    text = f"scores are far from the others, half of which are from {low:g} to {high:g}"
    if fence:
        yield from name_records("outliers", found, text)


def sample_grades(records: Sequence[Record]) -> list[GradedSample]:
    """Return responses of each mark, or those with the lowest and the highest scores."""
    graded = [record for record in records if record.grade is not None]
    if any(isinstance(record.grade, float) for record in graded):
        graded.sort(key=lambda record: record.grade or 0.0)
        picked = [*graded[:SAMPLES], *graded[SAMPLES:][-SAMPLES:]]
    else:
        sides = [[r for r in graded if r.grade is mark] for mark in (True, False)]
        rng = random.Random("look-marks")
        picked = [r for side in sides for r in rng.sample(side, min(SAMPLES, len(side)))]
    return [
        GradedSample(
            NAMES[record.grade] if isinstance(record.grade, bool) else f"{record.grade:g}",
            place_text(record),
            *(
                shorten_middle(" ".join(text.split()), LETTERS_SHOWN)
                for text in (request_of(record), record.chosen or "")
            ),
        )
        for record in picked
    ]
