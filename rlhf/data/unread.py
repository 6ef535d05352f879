"""Judge columns by their values: which columns that no layout reads may change what is learned."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.data.layouts import is_blank, read_number

MOST = 24  # different values that are kept of a column
FEW = 12  # most different values of a column of marks, in words
SHOWN = 6  # different values that a message lists
SCALE, STEP = 10, 5  # largest number of a short scale; numbers of percent are multiples of 5
SHORT = 200  # characters; lengths of longer texts are no scale
# A word, a number, "n/a", a symbol such as a thumb, or a sign that stands alone.
WORD = re.compile(r"[nN]/[aA]|[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+|[^\w\s!-~]|^[+-]$")
# A sentence has two words, or five letters of a script without spaces.
SENTENCE = re.compile(r"[^\W\d_]{2,}\W+[^\W\d_]{2,}|[^\W\d_a-zA-Z]{5}")


@cache
def word_lists() -> Mapping[str, frozenset[str]]:
    """Return the words that mean good or bad, or choose a response, by their kind."""
    lists: Mapping[str, Any] = read_yaml_beside(__file__, "words.yaml")
    return {kind: frozenset(words) for kind, words in lists.items()}


def split_words(text: str) -> list[str]:
    """Return the words of a value or a name in lower case: modelA, model_a and "Model A" alike."""
    return [word.casefold() for word in WORD.findall(text)]


def judge_words(text: str) -> int:
    """Return 1 if a word of ``text`` means good, -1 if one means bad, otherwise 0."""
    words, known = set(split_words(text)), word_lists()
    return -1 if words & known["bad"] else int(bool(words & known["good"]))


class Values(NamedTuple):
    """A summary of a column's values; the summaries of two parts can be joined."""

    different: Mapping[str | float, None]
    """The first different values that are no lists or objects: beginnings of texts, or numbers."""
    total: int
    blanks: int
    numbers: int
    texts: int
    """Texts that are no numbers, and true and false."""
    sentences: int
    lists: int
    """Lists of several sentences or objects."""
    low: float
    high: float
    is_whole: bool
    """True if all numbers are integers."""
    is_length: bool
    """True if each number is the length of a text of its row, in characters or words."""

    def join(self, other: Values) -> Values:
        """Return the summary of the values of both."""
        different = dict.fromkeys(list(self.different | other.different)[: MOST + 1])
        counts = (a + b for a, b in zip(self[1:7], other[1:7], strict=True))
        low, high = min(self.low, other.low), max(self.high, other.high)
        both = (a and b for a, b in zip(self[9:], other[9:], strict=True))
        return Values(different, *counts, low, high, *both)

    @property
    def varies(self) -> bool:
        """Return True if not all rows have the same value; lists and objects count as different."""
        return len(self.different) + bool(self.blanks) > 1 or not self.different

    @property
    def is_prose(self) -> bool:
        """Return True if most values are sentences, and not the names of a few kinds."""
        kinds = len(self.different)
        return 2 * self.sentences > self.total and (kinds > FEW or 2 * kinds > self.total)

    @property
    def may_grade(self) -> bool:
        """Return True for marks (true or false, words such as good and bad) and short scales."""
        words = [each for each in self.different if isinstance(each, str)]
        if self.numbers:
            known = word_lists()["middle"]
            return self._is_scale() and all(known.issuperset(split_words(word)) for word in words)
        is_text = self.texts == self.total and len(words) <= FEW
        return is_text and self.varies and _are_marks(words)

    def _is_scale(self) -> bool:
        """Return True for numbers on a short scale or in steps of percent that are no ids."""
        numbers = [each for each in self.different if isinstance(each, float)]
        is_id = self.is_whole and len(numbers) == self.total
        is_counted = is_id or self.is_length or not (self.varies or self.low < 0)
        is_percent = self.low >= 0 and not any(number % STEP for number in numbers)
        return not is_counted and self.low >= -SCALE and self.high <= (100 if is_percent else SCALE)

    def __str__(self) -> str:
        """Return the first different values as text."""
        shown = [f"{each:g}" if isinstance(each, float) else each for each in self.different]
        return ", ".join(shown[:SHOWN]) + (", ..." if shown[SHOWN:] else "")


def _are_marks(words: Sequence[str]) -> bool:
    """Return True if some of the words mean good and some bad, or all belong to such marks."""
    meant = {judge_words(word) for word in words}
    known = frozenset().union(*(word_lists()[kind] for kind in ("good", "bad", "middle")))
    return {1, -1} <= meant or (
        meant != {0} and all(known.issuperset(split_words(word)) for word in words)
    )


def summarize(values: Sequence[object], rows: Sequence[Mapping[str, object]] = ()) -> Values:
    """Return the summary of a column's values; ``rows`` are their whole rows."""
    given = [value for value in values if not is_blank(value)]
    keys = [_key_of(value) for value in given if not isinstance(value, list | dict)]
    numbers = [key for key in keys if isinstance(key, float)]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    return Values(
        dict.fromkeys(list(dict.fromkeys(keys))[: MOST + 1]),
        len(given),
        len(values) - len(given),
        len(numbers),
        len(keys) - len(numbers),
        sum(map(_is_sentence, keys)),
        sum(isinstance(each, list) and _are_answers(each) for each in given),
        low,
        high,
        all(number.is_integer() for number in numbers),
        bool(numbers and rows) and high <= SCALE and all(map(_is_length, values, rows)),
    )


def _key_of(value: object) -> str | float:
    number = None if isinstance(value, bool) else read_number(value)
    return str(value).strip()[:SHORT] if number is None else number


def _is_sentence(value: object) -> bool:
    return isinstance(value, str) and SENTENCE.search(value[:SHORT]) is not None


def _are_answers(items: Sequence[object]) -> bool:
    return len(items) > 1 and all(isinstance(each, dict) or _is_sentence(each) for each in items)


def _is_length(value: object, row: Mapping[str, object]) -> bool:
    texts = [each for each in row.values() if isinstance(each, str) and len(each) <= SHORT]
    return is_blank(value) or any(_key_of(value) in (len(t), len(t.split())) for t in texts)
