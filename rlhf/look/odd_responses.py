"""Find odd texts, turns and responses; whether an answer is right is not checked."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from rlhf.data.records import ASSISTANT_TURN, Message, Record, find_learned_turns, normalize_text
from rlhf.look.repeats import FINDING_TEXTS, DataFinding, report_records

SCRIPT_CHARACTERS = 40  # the letters in this many first characters decide an answer's script
JAPANESE = {"HIRAGANA": "CJK", "KATAKANA": "CJK"}  # scripts that Japanese mixes with CJK
LEAST_FREQUENT = 3  # a text that at least this many examples share is reported
MOST_FREQUENT = 3  # most texts that are reported
LONG = 40  # characters; longer responses should be sentences, and longer requests unique
UNFINISHED_ENDS = ",;:-("
USUAL_SHARE = 0.8  # if so many long responses end in punctuation, the others are reported
LOOP = 5  # a response with each distinct word this often (on average) goes in circles
NEXT_TURN = re.compile(r"\n\s*(?:#+ *)?(?:Human|User|Instruction|USER|<\|im_start\|>) *(?::|\n|\Z)")


def find_odd_responses(records: Sequence[Record]) -> Iterator[DataFinding]:
    """Yield findings on odd texts, turns and scripts, repeats, and odd responses not marked bad."""
    for kind, fault in FINDING_TEXTS["faults_of_texts"].items():
        is_faulty = re.compile(fault["pattern"]).search
        faulty = [r for r in records if any(is_faulty(part) for part in r.all_texts if part)]
        yield from report_records(kind, faulty, f"examples {fault['text']}")
    for kind, text in FINDING_TEXTS["faults_of_turns"].items():
        is_unusual = TURN_FAULTS[kind]
        unusual = [r for r in records if is_unusual(r.turns or r.messages or ())]
        yield from report_records(kind, unusual, f"examples {text}")
    answered = [r for r in records if r.chosen is not None and r.grade is not False]
    for kind, text in FINDING_TEXTS["faults_of_responses"].items():
        is_odd = RESPONSE_FAULTS[kind]
        odd = [r for r in answered if any(is_odd(answer, r) for answer in _learned_answers(r))]
        yield from report_records(kind, odd, f"{_name_responses(odd)} {text}")
    yield from _find_unfinished(answered)
    yield from _find_frequent(records)
    yield from _find_scripts(records)


def _name_responses(records: Iterable[Record]) -> str:
    marks = {(record.grade is True, record.rejected is not None) for record in records}
    names = {(True, False): "responses marked good", (False, True): "chosen responses"}
    return names.get(marks.pop(), "responses") if len(marks) == 1 else "responses"


def _learned_answers(record: Record) -> list[str]:
    """Return the answers that SFT learns, without white space at their ends."""
    learned = [record.turns[index].text for index in find_learned_turns(record.turns)]
    return [text.strip() for text in learned or [record.chosen or ""]]


def _last_request(record: Record) -> str:
    """Return the last request of a prompt, without "Human:" and "Assistant:"."""
    if record.messages:
        return record.messages[-1].text
    *_, request = re.split(r"\n\nHuman:", (record.prompt or "").removesuffix(ASSISTANT_TURN))
    return request


def _is_echo(answer: str, record: Record) -> bool:
    request, response = normalize_text(_last_request(record)), normalize_text(answer)
    return response.startswith(request) and (response == request or len(request) >= LONG)


def _goes_in_circles(answer: str, _: Record) -> bool:
    words = answer.split()
    return len(words) > 3 * LOOP and len(words) >= LOOP * len(set(words))


RESPONSE_FAULTS: dict[str, Callable[[str, Record], bool]] = {
    "next_turn": lambda answer, _: NEXT_TURN.search(answer) is not None,
    "echo": _is_echo,
    "loop": _goes_in_circles,
}

TURN_FAULTS: dict[str, Callable[[Sequence[Message]], bool]] = {
    "blank_turn": lambda turns: any(not turn.text.strip() and not turn.shown for turn in turns),
    "two_in_a_row": lambda turns: any(
        one.role == other.role != "tool" for one, other in pairwise(turns)
    ),
}


def _find_unfinished(records: Sequence[Record]) -> Iterator[DataFinding]:
    long = [r for r in records if any(len(text) >= LONG for text in _learned_answers(r))]
    cut = [r for r in long if any(map(_is_unfinished, _learned_answers(r)))]
    if len(cut) <= (1 - USUAL_SHARE) * len(long):
        text = f"long {_name_responses(cut)} may be cut: they end in a letter, digit or comma"
        yield from report_records("unfinished", cut, f"of {len(long):,} {text}")


def _is_unfinished(answer: str) -> bool:
    return len(answer) >= LONG and (answer[-1].isalnum() or answer[-1] in UNFINISHED_ENDS)


def _find_frequent(records: Sequence[Record]) -> Iterator[DataFinding]:
    has_pairs = any(record.rejected is not None for record in records)
    names = {"prompt": "prompts", "chosen": "chosen responses" if has_pairs else "responses"}
    for part, name in names.items():
        texts = Counter(" ".join((getattr(r, part) or "").split()) for r in records)
        del texts[""]
        top = [(text, n) for text, n in texts.most_common(MOST_FREQUENT) if n >= LEAST_FREQUENT]
        if top:
            shown = "; ".join(f"{text[:80]!r} in {count:,} examples" for text, count in top)
            yield DataFinding(f"frequent_{part}", len(top), f"The most frequent {name}: {shown}")


def _find_scripts(records: Sequence[Record]) -> Iterator[DataFinding]:
    scripts = [(record, _script_of(record.chosen or "")) for record in records]
    counts = Counter(script for _, script in scripts if script)
    if len(counts) > 1:
        named = ", ".join(f"{script} {count:,}" for script, count in counts.most_common())
        ((usual, _),) = counts.most_common(1)
        others = [record for record, script in scripts if script not in ("", usual)]
        text = f"answers are in a different script from most ({named})"
        yield from report_records("scripts", others, text)


def _script_of(text: str) -> str:
    """Return the Unicode name of the script of most of the first letters; "" without letters."""
    letters = filter(str.isalpha, text[:SCRIPT_CHARACTERS])
    names = (unicodedata.name(letter, "UNKNOWN").split()[0] for letter in letters)
    counts = Counter(JAPANESE.get(name, name) for name in names)
    return max(counts, key=counts.__getitem__, default="")
