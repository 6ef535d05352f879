"""Propose expressions for rows that no layout fits, by the names and values of their columns."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rlhf.data.records import ASSISTANT_TURN
from rlhf.data.unread import Values, find_words, judge_words, word_lists
from rlhf.data.written_lists import are_messages, parse_list

NAME = re.compile(r"[A-Za-z_]\w*\Z")  # names that an expression needs no quotes for
CHOOSE, PAIR = "CHOOSE_A_COLUMN", ("first", "second")


def quote(name: str) -> str:
    """Return a column's name as an expression."""
    return name if NAME.match(name) else json.dumps(name, ensure_ascii=False)


def split_side(name: str) -> tuple[tuple[str, ...], str]:
    """Return a name's words without its side, and the side: a letter, number or word."""
    words, lists = find_words(name), word_lists()
    sides = [word for word in words if word.isdigit() or word in lists["first"] | lists["second"]]
    return tuple(word for word in words if word not in sides), sides[-1] if sides else ""


def find_families(names: Iterable[str]) -> list[list[str]]:
    """Return lists of names that differ only in their sides, such as response_a and response_b."""
    families: defaultdict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for name in names:
        stem, side = split_side(name)
        if stem and side:
            families[stem][side] = name
    second = word_lists()["second"]
    return [
        [family[side] for side in sorted(family, key=lambda side: (side in second, side))]
        for family in families.values()
        if len(family) > 1
    ]


def find_choices(columns: Mapping[str, Values], rivals: Sequence[str]) -> list[list[str]]:
    """Return, for each column that names the better of two ``rivals``, tests of its values.

    The tests are for: the first is better, the second is better, and a tie if the column has one.
    """
    choices = []
    for name, values in columns.items() if len(rivals) == len(PAIR) else ():
        sides = {value: _find_side(value, rivals) for value in values.different}
        tests: dict[int, str] = {
            side: f"to_number({quote(name)}) == `{value:g}`"
            if isinstance(value, float)
            else f"{quote(name)} == '{value}'"
            for value, side in sides.items()
            if side is not None
        }
        if {0, 1} <= tests.keys() and len(tests) == len(sides):
            choices.append([tests[side] for side in sorted(tests)])
    return choices


def _find_side(value: str | float, rivals: Sequence[str]) -> int | None:
    """Return the index (0, 1) of the rival that a value names, 2 for a tie, otherwise None."""
    text, lists = f"{value:g}" if isinstance(value, float) else value, word_lists()
    side = split_side(text)[1]
    for index, name in enumerate(rivals):
        if text.casefold() == name.casefold() or (side and side == split_side(name)[1]):
            return index
    kinds = [kind for kind in PAIR if side in lists[kind]]
    is_tie = not lists["tie"].isdisjoint(find_words(text))
    return len(PAIR) if is_tie else PAIR.index(kinds[0]) if kinds else None


def propose(
    columns: Mapping[str, Values],
    typical: Mapping[str, object],
    *,
    asking: Sequence[str],
    answering: Sequence[str],
) -> dict[str, str]:
    """Return expressions for the targets of rows; what cannot be known is CHOOSE_A_COLUMN.

    ``asking`` and ``answering`` are usual names of prompts and responses.
    """
    lists = [name for name, value in typical.items() if are_messages(value)]
    texts = [n for n, value in typical.items() if isinstance(value, str) and not parse_list(value)]
    usual = {name.strip().casefold(): name for name in texts}
    marks = [name for name, values in columns.items() if values.may_grade]
    answers = [name for name in (*lists, *texts) if name not in marks]
    families = find_families(answers)
    good, bad = ([n for n in answers if judge_words(n) == sign] for sign in (1, -1))
    is_pair = len(good) == len(bad) == 1
    compared = {name for family in families for name in family}
    compared |= {*good, *bad} if is_pair else set()
    prose = [n for n in texts if columns[n].is_prose and n not in compared]
    asked = [usual[name] for name in asking if name in usual]
    question = next(iter(asked or prose or (texts if len(texts) == 1 else [])), "QUESTION")
    is_rendered = ASSISTANT_TURN in str(typical.get(question))
    prompt = {"prompt": quote(question) if is_rendered else f"human({quote(question)})"}
    if conversation := next((name for name in lists if name not in compared), None):
        prompt = {"prompt": quote(conversation)}
    elif compared & set(lists):
        prompt = {}
    grade = {"grade": columns[marks[0]].as_grade(quote(marks[0]))} if len(marks) == 1 else {}
    if is_pair:
        return prompt | {"chosen": quote(good[0]), "rejected": quote(bad[0])}
    if families:
        return prompt | _propose_comparison(families[0], columns)
    if conversation:
        return {"messages": quote(conversation)} | grade
    answer = [usual[name] for name in answering if name in usual][:1]
    answer = answer or [name for name in prose if name != question and name not in asked]
    if len(answer) != 1:
        return prompt | dict.fromkeys(["chosen", "rejected"][: max(1, len(answer))], CHOOSE)
    return prompt | {"chosen": quote(answer[0])} | grade


def _propose_comparison(rivals: Sequence[str], columns: Mapping[str, Values]) -> dict[str, str]:
    """Return targets that compare ``rivals`` by a column that names the better, or by numbers."""
    names = [quote(name) for name in rivals]
    choices = find_choices(columns, rivals)
    if len(choices) == 1:
        first, second, *ties = choices[0]
        rest = [f"pick({second}, {name}, `null`)" if ties else name for name in reversed(names)]
        texts = (f"pick({first}, {name}, {other})" for name, other in zip(names, rest, strict=True))
        return dict(zip(("chosen", "rejected"), texts, strict=True))
    sides = [split_side(name)[1] for name in rivals]
    grading = find_families(name for name, values in columns.items() if values.may_grade)
    families = [[n for n in each if split_side(n)[1] in sides] for each in grading]
    families = [each for each in families if len(each) == len(rivals)]
    if choices or len(families) != 1:
        return {"chosen": CHOOSE, "rejected": CHOOSE}
    target = "ranks" if "rank" in families[0][0].casefold() else "scores"
    numbers = ", ".join(quote(name) for name in families[0])
    return {"responses": f"[{', '.join(names)}]", target: f"[{numbers}]"}
