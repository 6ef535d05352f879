"""Find odd texts, turns and responses, and grades that other responses contradict.

No rule here knows a right answer: a finding names what is odd, the responses that contradict one
another, or the words in which a response is like those with another mark.
"""

from __future__ import annotations

import math
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, pairwise
from statistics import quantiles
from typing import NamedTuple

from rlhf.data.records import (
    ASSISTANT_TURN,
    Message,
    Record,
    find_learned_turns,
    normalize_text,
    prompt_key,
)
from rlhf.look.repeats import (
    NEAR,
    DataFinding,
    jaccard,
    name_matches,
    name_records,
    place_text,
)
from rlhf.look.shown_examples import shorten_middle

SCRIPT_LETTERS = 40  # letters of an answer that decide its script
JAPANESE = {"HIRAGANA": "CJK", "KATAKANA": "CJK"}  # scripts that Japanese mixes with CJK
FREQUENT = 3  # examples from which a text in several examples is named
MOST_FREQUENT = 3  # texts that are named
LONG = 40  # letters from which a response is expected to be a sentence, or a request to be unique
UNFINISHED = ",;:-("
USUAL = 0.8  # share of long responses that end in punctuation, from which the others are named
LOOP = 5  # words for each different word, from which a response goes in circles
TEXT_FAULTS = {
    "wrong_encoding": (r"\ufffd|[ÃÂ][\x80-\xbf]|â[€\x80]", "have letters of a wrong encoding"),
    "html": (
        r"</?(?:a|b|br|div|em|font|i|li|p|span|strong|td|tr|ul)\b[^<>]*>|&(?:\w{2,6}|#\d+);",
        "have marks of HTML",
    ),
    "escaped": (
        r"\\[nt](?![a-zA-Z])",
        "have a line end or a tab written as two letters, \\n or \\t",
    ),
    "unfilled": (
        r"\{\{ *\w+ *\}\}|\[(?:INSERT|YOUR|NAME)\b[^\]]*\]|(?i:lorem ipsum)",
        "have a place that was not filled, such as {{name}} or lorem ipsum",
    ),
}
NEXT_TURN = re.compile(r"\n\s*(?:#+ *)?(?:Human|User|Instruction|USER|<\|im_start\|>) *(?::|\n|\Z)")
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


def find_odd_responses(records: Sequence[Record]) -> Iterator[DataFinding]:
    """Yield what is odd in the texts of ``records``, and in responses that are not marked bad."""
    for kind, (pattern, text) in TEXT_FAULTS.items():
        is_faulty = re.compile(pattern).search
        found = [r for r in records if any(is_faulty(each) for each in r.all_texts if each)]
        yield from name_records(kind, found, f"examples {text}")
    for kind, (is_unusual, text) in TURN_FAULTS.items():
        found = [r for r in records if is_unusual(r.turns or r.messages or ())]
        yield from name_records(kind, found, f"examples {text}")
    answered = [r for r in records if r.chosen is not None and r.grade is not False]
    for kind, (is_odd, text) in RESPONSE_FAULTS.items():
        odd = [r for r in answered if any(is_odd(each, r) for each in _answers_of(r))]
        yield from name_records(kind, odd, f"{_name_responses(odd)} {text}")
    yield from _find_unfinished(answered)
    yield from _find_frequent(records)
    yield from _find_scripts(records)


def _name_responses(records: Iterable[Record]) -> str:
    marks = {(record.grade is True, record.rejected is not None) for record in records}
    names = {(True, False): "responses marked good", (False, True): "chosen responses"}
    return names.get(marks.pop(), "responses") if len(marks) == 1 else "responses"


def _answers_of(record: Record) -> list[str]:
    """Return the answers that SFT learns, without white space at their ends."""
    learned = [record.turns[index].text for index in find_learned_turns(record.turns)]
    return [text.strip() for text in learned or [record.chosen or ""]]


def request_of(record: Record) -> str:
    """Return the last request of a prompt, without the names of plain turns."""
    if record.messages:
        return record.messages[-1].text
    *_, request = re.split(r"\n\nHuman:", (record.prompt or "").removesuffix(ASSISTANT_TURN))
    return request


def _has_next_turn(answer: str, _: Record) -> bool:
    return NEXT_TURN.search(answer) is not None


def _is_echo(answer: str, record: Record) -> bool:
    request, response = normalize_text(request_of(record)), normalize_text(answer)
    return response.startswith(request) and (response == request or len(request) >= LONG)


def _goes_in_circles(answer: str, _: Record) -> bool:
    words = answer.split()
    return len(words) > 3 * LOOP and len(words) >= LOOP * len(set(words))


RESPONSE_FAULTS: dict[str, tuple[Callable[[str, Record], bool], str]] = {
    "next_turn": (_has_next_turn, "go on with a turn of the user"),
    "echo": (_is_echo, "begin with the whole request"),
    "loop": (_goes_in_circles, "say the same few words again and again"),
}


def _has_blank_turn(turns: Sequence[Message]) -> bool:
    return any(not turn.text.strip() and not turn.shown for turn in turns)


def _has_two_in_a_row(turns: Sequence[Message]) -> bool:
    roles = (turn.role for turn in turns)
    return any(one == other != "tool" for one, other in pairwise(roles))


TURN_FAULTS: dict[str, tuple[Callable[[Sequence[Message]], bool], str]] = {
    "blank_turn": (_has_blank_turn, "have an empty turn, which is skipped"),
    "two_in_a_row": (_has_two_in_a_row, "have two turns of the same role in a row"),
}


def _find_unfinished(records: Sequence[Record]) -> Iterator[DataFinding]:
    long = [r for r in records if any(len(text) >= LONG for text in _answers_of(r))]
    cut = [r for r in long if any(map(_is_unfinished, _answers_of(r)))]
    if len(cut) <= (1 - USUAL) * len(long):
        text = f"long {_name_responses(cut)} may be cut: they end in a letter or a comma"
        yield from name_records("unfinished", cut, f"of {len(long):,} {text}")


def _is_unfinished(answer: str) -> bool:
    return len(answer) >= LONG and (answer[-1].isalnum() or answer[-1] in UNFINISHED)


def _find_frequent(records: Sequence[Record]) -> Iterator[DataFinding]:
    has_pairs = any(record.rejected is not None for record in records)
    names = {"prompt": "prompts", "chosen": "chosen responses" if has_pairs else "responses"}
    for part, name in names.items():
        texts = Counter(" ".join((getattr(r, part) or "").split()) for r in records)
        del texts[""]
        often = [(text, n) for text, n in texts.most_common(MOST_FREQUENT) if n >= FREQUENT]
        if often:
            shown = "; ".join(f"{text[:80]!r} in {count:,} examples" for text, count in often)
            yield DataFinding(f"frequent_{part}", len(often), f"The most frequent {name}: {shown}")


def _find_scripts(records: Sequence[Record]) -> Iterator[DataFinding]:
    scripts = [(record, _script_of(record.chosen or "")) for record in records]
    counts = Counter(script for _, script in scripts if script)
    if len(counts) > 1:
        named = ", ".join(f"{script} {count:,}" for script, count in counts.most_common())
        ((usual, _),) = counts.most_common(1)
        others = [record for record, script in scripts if script not in ("", usual)]
        text = f"answers are in another script than most ({named})"
        yield from name_records("scripts", others, text)


def _script_of(text: str) -> str:
    """Return the script of most of the first letters, as Unicode names it; "" without letters."""
    letters = filter(str.isalpha, text[:SCRIPT_LETTERS])
    names = (unicodedata.name(letter, "UNKNOWN").split()[0] for letter in letters)
    found = Counter(JAPANESE.get(name, name) for name in names)
    return max(found, key=found.__getitem__, default="")


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
