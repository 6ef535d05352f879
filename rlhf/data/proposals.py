"""Propose what to read of rows that no layout reads whole, by the columns' names and values."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rlhf.data.records import ASSISTANT_TURN
from rlhf.data.unread import Values, judge_words, split_words, word_lists
from rlhf.data.written_lists import are_messages, parse_list

NAME = re.compile(r"[A-Za-z_]\w*\Z")  # names that an expression needs no quotes for
CHOOSE, TIE = "CHOOSE_A_COLUMN", "tie"


def quote(name: str) -> str:
    """Return a column's name as an expression."""
    return name if NAME.match(name) else json.dumps(name, ensure_ascii=False)


def split_side(name: str) -> tuple[tuple[str, ...], str]:
    """Return the words of a name, and the letter, number or side in it, such as a, 1 or left."""
    words, lists = split_words(name), word_lists()
    sides = [each for each in words if each.isdigit() or each in lists["first"] | lists["second"]]
    return tuple(each for each in words if each not in sides), sides[-1] if sides else ""


def find_families(names: Iterable[str]) -> list[dict[str, str]]:
    """Return names that differ only in their sides, by side, such as response_a and response_b."""
    families: defaultdict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for name in names:
        stem, side = split_side(name)
        if stem and side:
            families[stem][side] = name
    return [dict(sorted(each.items(), key=_order)) for each in families.values() if len(each) > 1]


def _order(side: tuple[str, str]) -> tuple[bool, str]:
    return side[0] in word_lists()["second"], side[0]


def find_choices(
    columns: Mapping[str, Values], first: str, second: str
) -> list[tuple[str, str, bool]]:
    """Return columns whose values name two responses: the test for each, and if there are ties."""
    found = []
    for name, values in columns.items():
        chosen = {value: _find_chosen(value, first, second) for value in values.different}
        tests = [
            [_compare(name, value) for value, response in chosen.items() if response == wanted]
            for wanted in (first, second)
        ]
        if "" not in chosen.values() and len(tests[0]) == len(tests[1]) == 1:
            found.append((tests[0][0], tests[1][0], TIE in chosen.values()))
    return found


def _find_chosen(value: str | float, first: str, second: str) -> str:
    """Return the response that a value names, or TIE; "" if it names neither."""
    text, lists = f"{value:g}" if isinstance(value, float) else value, word_lists()
    side = split_side(text)[1]
    for name in (first, second):
        if text.casefold() == name.casefold() or (side and side == split_side(name)[1]):
            return name
    if lists["tie"] & set(split_words(text)):
        return TIE
    return first if side in lists["first"] else second if side in lists["second"] else ""


def _compare(name: str, value: str | float) -> str:
    if isinstance(value, float):
        return f"to_number({quote(name)}) == `{value:g}`"
    return f"{quote(name)} == '{value}'"


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
    compared = {name for family in families for name in family.values()}
    compared |= {*good, *bad} if is_pair else set()
    prose = [n for n in texts if columns[n].is_prose and n not in compared]
    asked = [usual[name] for name in asking if name in usual]
    found = next(iter(asked or prose or (texts if len(texts) == 1 else [])), "QUESTION")
    is_rendered = ASSISTANT_TURN in str(typical.get(found))
    prompt = {"prompt": quote(found) if is_rendered else f"human({quote(found)})"}
    if talk := next((name for name in lists if name not in compared), None):
        prompt = {"prompt": quote(talk)}
    elif compared & set(lists):
        prompt = {}
    if is_pair:
        return prompt | {"chosen": quote(good[0]), "rejected": quote(bad[0])}
    if families:
        return prompt | _propose_comparison(list(families[0].values()), columns)
    if talk:
        return {"messages": quote(talk)} | _propose_grade(marks)
    answer = [usual[n] for n in answering if n in usual] or [n for n in prose if n != found]
    if len(answer) != 1 and not usual.keys() & set(answering):
        return prompt | {"chosen": CHOOSE}
    return prompt | {"chosen": quote(answer[0])} | _propose_grade(marks)


def _propose_grade(marks: Sequence[str]) -> dict[str, str]:
    return {"grade": quote(marks[0])} if len(marks) == 1 else {}


def _propose_comparison(names: Sequence[str], columns: Mapping[str, Values]) -> dict[str, str]:
    """Return the targets of responses that a column chooses from, or that have a number each."""
    first, second, *more = names
    choices = [] if more else find_choices(columns, first, second)
    if len(choices) == 1:
        ((better, worse, has_ties),) = choices
        if not has_ties:
            sides = (quote(first), quote(second)), (quote(second), quote(first))
            texts = (f"pick({better}, {yes}, {no})" for yes, no in sides)
            return dict(zip(("chosen", "rejected"), texts, strict=True))
        ranks = ", ".join(f"pick({test}, `1`, `2`)" for test in (better, worse))
        return {"responses": f"[{quote(first)}, {quote(second)}]", "ranks": f"[{ranks}]"}
    sides = [split_side(name)[1] for name in names]
    graded = find_families(name for name, values in columns.items() if values.may_grade)
    scores = [family for family in graded if family.keys() >= set(sides)]
    if choices or len(scores) != 1:
        return {"chosen": CHOOSE, "rejected": CHOOSE}
    numbers = [scores[0][side] for side in sides]
    target = "ranks" if "rank" in numbers[0].casefold() else "scores"
    return {
        each: f"[{', '.join(map(quote, group))}]"
        for each, group in (("responses", names), (target, numbers))
    }
