"""Odd texts, turns and responses: found with their places, and no others."""

from collections.abc import Iterable

import pytest

from rlhf.data.records import Message, Record
from rlhf.look.odd_responses import find_odd_responses
from rlhf.look.repeats import DataFinding

TOWNS = "Oslo Lima Cairo Quito Hanoi Accra Perth Turin".split()


def polite(n: int) -> str:
    return f" Gladly! Please look in {TOWNS[n % 8]} for number {n} first."


def record(n: int, chosen: str, rejected: str | None = None, grade: bool | None = None) -> Record:
    prompt = f"\n\nHuman: Where is shop {n}?\n\nAssistant:"
    return Record(prompt, chosen, rejected, grade=grade, place=("a.csv", n))


def by_kind(found: Iterable[DataFinding]) -> dict[str, DataFinding]:
    return {each.kind: each for each in found}


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        ("wrong_encoding", " The cafÃ© is in the second street."),
        ("wrong_encoding", " The caf\ufffd is in the second street."),
        ("html", " Look in the <b>second</b> street."),
        ("html", " Look in the second street &amp; the third."),
        ("escaped", " Look there:\\n1. the second street."),
        ("unfilled", " Look in {{street}} first."),
        ("unfilled", " Look in [INSERT STREET] first."),
        ("next_turn", " In the second street.\n\nHuman: And the other one?"),
        ("echo", " Where is shop 4? "),
        ("loop", " second street" * 40 + "."),
        ("unfinished", " Look in the second street behind the station and"),
        ("unfinished", " Look in the second street behind the station,"),
        ("scripts", " 在第二条街的车站后面。"),
    ],
)
def test_an_odd_response_is_named_with_its_place(kind: str, chosen: str) -> None:
    usual = [record(n, polite(n)) for n in range(20)]
    assert by_kind(find_odd_responses(usual)) == {}
    usual[4] = record(4, chosen)
    found = by_kind(find_odd_responses(usual))
    assert list(found) == [kind]
    assert (found[kind].count, found[kind].places) == (1, ["a.csv, row 4"])


def test_odd_responses_that_are_marked_bad_are_no_finding() -> None:
    usual = [record(n, polite(n), grade=True) for n in range(20)]
    loop = " second street" * 40
    assert "loop" not in by_kind(find_odd_responses([*usual, record(4, loop, grade=False)]))
    found = by_kind(find_odd_responses([*usual, record(4, loop, grade=True)]))["loop"]
    assert found.text.startswith("1 responses marked good repeat the same few words")


def test_code_and_short_answers_are_not_odd() -> None:
    answers = [" 42", " yes", " for x in range(3): print(x)", " $\\neq$ or \\text{a}", " a < b > c"]
    assert by_kind(find_odd_responses([record(n, each) for n, each in enumerate(answers)])) == {}


def test_every_learned_answer_and_every_turn_of_a_conversation_is_read() -> None:
    def talk(n: int, *said: str) -> Record:
        roles = {"u": "user", "a": "assistant"}
        turns = tuple(Message(roles[each[0]], each[1:]) for each in said)
        return Record("Q", polite(n), turns=turns, messages=turns[:-1], place=("a.csv", n))

    usual = [talk(n, f"u{n}?", f"a{polite(n)}", "uMore?", f"a{polite(n + 1)}") for n in range(20)]
    assert not by_kind(find_odd_responses(usual)).keys() - {"frequent_prompt"}
    cut = "aLook in the second street behind the station and"
    usual[3] = talk(3, "u3?", cut, "uMore?", f"a{polite(4)}")
    usual[5] = talk(5, "u5?", "a ", "uMore?", f"a{polite(6)}")
    usual[7] = talk(7, "u7?", "uMore?", f"a{polite(8)}")
    found = by_kind(find_odd_responses(usual))
    places = {kind: each.places for kind, each in found.items() if kind != "frequent_prompt"}
    assert places == {
        "blank_turn": ["a.csv, row 5"],
        "two_in_a_row": ["a.csv, row 7"],
        "unfinished": ["a.csv, row 3"],
    }


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ([" yes", " oui, ça va", " 42", " :-)"], ""),
        ([" yes", " no", " 今天很好", " はい", " カメラ"], "CJK 3, LATIN 2"),
        ([" да", " так", " 好"], "CYRILLIC 2, CJK 1"),
    ],
)
def test_answers_in_another_script_are_named(answers: list[str], named: str) -> None:
    records = [Record(f"Q{n}", answer) for n, answer in enumerate(answers)]
    found = by_kind(find_odd_responses(records))
    assert ("scripts" in found) == bool(named)
    assert not named or f"({named})" in found["scripts"].text


def test_frequent_texts_are_counted_and_named_as_what_they_are() -> None:
    records = [Record(f"Q{n}", " nan") for n in range(5)] + [Record(f"R{n}", " ?") for n in "abc"]
    (found,) = find_odd_responses(records)
    assert found.text == "The most frequent responses: 'nan' in 5 examples; '?' in 3 examples"
    (found,) = find_odd_responses([each._replace(rejected=each.prompt) for each in records])
    assert found.text.startswith("The most frequent chosen responses: 'nan'")
