"""Judge columns by their values: which columns that no layout reads may change what is learned."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.data.layouts import is_blank, read_number

MOST_KEPT, FEW = 24, 12  # different values: most that are kept; most of a column of word marks
MOST_SHOWN = 6  # different values in a message
SCALE, PERCENT, STEP = 10, 100, 5  # a short scale ends at 10, or at 100 in steps of 5
SHORT_TEXT = 200  # characters of a text that are read; the lengths of longer texts are not compared
# A word, a number, "n/a", a symbol such as a thumb, or a sign that stands alone.
WORD = re.compile(r"[nN]/[aA]|[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+|[^\w\s!-~]|^[+-]$")
# A sentence has two long words, or five letters of a script without spaces.
SENTENCE = re.compile(r"[^\W\d_]{2,}\W+(?:\w\W+)?[^\W\d_]{2,}|[^\W\d_a-zA-Z]{5}")


@cache
def word_lists() -> Mapping[str, frozenset[str]]:
    """Return the words that mean good or bad, or choose a response, by their kind."""
    lists: Mapping[str, Any] = read_yaml_beside(__file__, "words.yaml")
    return {kind: frozenset(words) for kind, words in lists.items()}


def find_words(text: str) -> list[str]:
    """Return the words of a value or a name in lower case: modelA, model_a and "Model A" alike."""
    return [word.casefold() for word in WORD.findall(text)]


def judge_words(text: str) -> int:
    """Return -1 if a word of ``text`` means bad, otherwise 1 if a word means good, otherwise 0."""
    words, known = set(find_words(text)), word_lists()
    return -1 if words & known["bad"] else int(bool(words & known["good"]))


def are_middle(texts: Sequence[str], *kinds: str) -> bool:
    """Return True if each word of the texts is in the list middle or ``kinds`` of words.yaml."""
    known = frozenset().union(*(word_lists()[kind] for kind in ("middle", *kinds)))
    return all(known.issuperset(find_words(text)) for text in texts)


class Values(NamedTuple):
    """A summary of a column's values; the summaries of two parts can be joined."""

    different: Mapping[str | float, None]
    """The first different values: numbers, and beginnings of other values as text."""
    total: int
    blanks: int
    answers: int
    """Number of values that are lists of several sentences or objects."""
    is_length: bool
    """True if each number is the length of a text of its row, in characters or words."""

    def join(self, other: Values) -> Values:
        """Return the summary of all values of this summary and of ``other``."""
        different = dict.fromkeys([*self.different, *other.different])
        return Values(
            dict.fromkeys(list(different)[: MOST_KEPT + 1]),
            self.total + other.total,
            self.blanks + other.blanks,
            self.answers + other.answers,
            self.is_length and other.is_length,
        )

    @property
    def numbers(self) -> list[float]:
        """Return the first different numbers."""
        return [value for value in self.different if isinstance(value, float)]

    @property
    def words(self) -> list[str]:
        """Return the beginnings of the first different values that are no numbers."""
        return [value for value in self.different if isinstance(value, str)]

    @property
    def varies(self) -> bool:
        """Return True if not all rows have the same value."""
        return len(self.different) + bool(self.blanks) > 1

    @property
    def is_prose(self) -> bool:
        """Return True if most values are sentences, and not the names of a few kinds."""
        kinds = len(self.different)
        is_open = kinds > FEW or 2 * kinds > self.total
        return is_open and 2 * sum(map(is_sentence, self.words)) > kinds

    @property
    def may_grade(self) -> bool:
        """Return True for marks (true or false, words such as good and bad) and short scales."""
        if numbers := self.numbers:
            is_id = len(numbers) == self.total and all(map(float.is_integer, numbers))
            is_no_grade = is_id or self.is_length or not (self.varies or numbers[0] < 0)
            is_percent = min(numbers) >= 0 and not any(number % STEP for number in numbers)
            is_scale = -SCALE <= min(numbers) <= max(numbers) <= (PERCENT if is_percent else SCALE)
            return is_scale and not is_no_grade and are_middle(self.words)
        meant = {judge_words(word) for word in self.words}
        is_known = meant > {0} and are_middle(self.words, "good", "bad")
        return self.varies and len(self.words) <= FEW and ({1, -1} <= meant or is_known)

    def as_grade(self, expression: str) -> str:
        """Return an expression that reads the column of ``expression`` as a mark or a score."""
        good = sorted(f"'{word}'" for word in self.words if judge_words(word) > 0)
        is_mark = {word.casefold() for word in self.words} <= {"true", "false"}
        is_read = self.numbers or is_mark or not self.may_grade
        return expression if is_read else f"contains([{', '.join(good)}], {expression})"

    def __str__(self) -> str:
        """Return the first different values as text."""
        shown = [f"{value:g}" if isinstance(value, float) else value for value in self.different]
        return ", ".join(shown[:MOST_SHOWN]) + (", ..." if shown[MOST_SHOWN:] else "")


def summarize(values: Sequence[object], rows: Sequence[Mapping[str, object]] = ()) -> Values:
    """Return the summary of a column's values; ``rows`` are their whole rows."""
    present = [value for value in values if not is_blank(value)]
    different = list(dict.fromkeys(map(_shorten, present)))[: MOST_KEPT + 1]
    is_length = bool(rows) and all(map(_is_length, values, rows))
    return Values(
        dict.fromkeys(different),
        len(present),
        len(values) - len(present),
        sum(map(_are_answers, present)),
        is_length,
    )


def _shorten(value: object) -> str | float:
    number = None if isinstance(value, bool) else read_number(value)
    text = value if isinstance(value, str) else repr(value) if isinstance(value, bool) else "..."
    return text.strip()[:SHORT_TEXT] if number is None else number


def is_sentence(value: object) -> bool:
    """Return True for a text of several words."""
    return isinstance(value, str) and SENTENCE.search(value[:SHORT_TEXT]) is not None


def _are_answers(value: object) -> bool:
    items = value if isinstance(value, list) else []
    return len(items) > 1 and all(isinstance(item, dict) or is_sentence(item) for item in items)


def _is_length(value: object, row: Mapping[str, object]) -> bool:
    texts = [text for text in row.values() if isinstance(text, str) and len(text) <= SHORT_TEXT]
    return is_blank(value) or any(_shorten(value) in (len(t), len(t.split())) for t in texts)
