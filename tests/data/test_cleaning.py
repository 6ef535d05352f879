"""Texts are mended without loss of meaning; an example is taken once, in whatever set it is."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.records import Dropped, RawDataset, Record, clean_records, clean_text, fingerprint
from rlhf.data.stored import drop_repeated_examples
from tests.data.row_tables import load, write


def dataset(*train: Record, held_out: list[Record] | None = None) -> RawDataset:
    return RawDataset("pets", list(train), held_out, "preference", Dropped({"old": 1}))


def pair(prompt: str, chosen: str = "a", rejected: str = "b") -> Record:
    return Record(prompt=prompt, chosen=chosen, rejected=rejected)


# ------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("a\r\nb\rc\n", "a\nb\nc\n"),
        ("a \t\nb", "a\nb"),
        ("a\x0cb\x0bc\x85d", "a\nb\nc\nd"),
        ("a\x00b\x07c\x7fd\x9f", "abcd"),
        ("e\u0301", "\u00e9"),
        ("\u30ab\u3099", "\u30ac"),  # KA and its voicing mark: GA
        ("\ud83d half", " half"),
        ("\U0001f468\u200d\U0001f469", "\U0001f468\u200d\U0001f469"),
        ("ends in white space: ", "ends in white space: "),
        ("\n\nHuman: a\n\nAssistant:", "\n\nHuman: a\n\nAssistant:"),
    ],
)
def test_text_is_mended(text: str, cleaned: str) -> None:
    assert clean_text(text) == cleaned


@given(st.text(st.characters(codec=None)))
def test_clean_text_is_stable_and_can_be_written(text: str) -> None:
    once = clean_text(text)
    assert clean_text(once) == once
    assert not [c for c in once if unicodedata.category(c) == "Cc" and c not in "\n\t"]
    once.encode()


def test_what_is_empty_after_cleaning_is_left_out_and_counted() -> None:
    kept = pair("\x07Q", "a\r\n", "b")
    left_out = Dropped({"old": 1})
    texts = [("\x07",), ("Q", "\x00"), ("Q", "a", "\x00 "), ("Q", "a\x00", "a")]
    others = [*(pair(*each) for each in texts), Record(text="\x00"), Record(prompt="\r")]
    cleaned = clean_records([kept, *others], left_out)
    assert cleaned == [pair("Q", "a\n", "b")]
    assert left_out == {
        "old": 1,
        "prompt is empty after cleaning": 2,
        "chosen is empty after cleaning": 1,
        "rejected is empty after cleaning": 1,
        "chosen equals rejected after cleaning": 1,
        "text is empty after cleaning": 1,
    }


# ---------------------------------------------------------------------------------------- repeating


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (("a b",), (" A\n\tB ",), True),
        (("Straße",), ("STRASSE",), True),
        (("ab",), ("a b",), False),
        (("a", "b"), ("b", "a"), False),
        (("a", None), ("a", "None"), False),
        (("a", ""), ("a", None), False),
    ],
)
def test_fingerprint_ignores_white_space_and_case_alone(
    one: tuple[str | None, ...], other: tuple[str | None, ...], is_same: bool
) -> None:
    assert (fingerprint(*one) == fingerprint(*other)) is is_same


def test_repeated_examples_are_left_out_across_sets_and_counted_for_each() -> None:
    held_out = [pair("e"), pair("E"), pair("q")]  # the last is in the training examples too
    one = dataset(pair("q"), pair("Q "), pair("q", "other"), held_out=held_out)
    two = dataset(pair("r"), pair(" q"), pair("R"), Record(prompt="q"))
    first, second = drop_repeated_examples([one, two])
    assert first.train == [pair("q"), pair("q", "other")]
    assert first.eval == [pair("e"), pair("q")]
    assert second.train == [pair("r"), Record(prompt="q")]
    assert second.eval is None
    assert first.left_out == {"old": 1, "repeats an earlier example": 2}
    assert second.left_out == {"old": 1, "repeats an earlier example": 2}


@pytest.mark.parametrize(
    ("keys", "texts"),
    [
        ({"clean": True, "deduplicate": True}, ["a", "b"]),
        ({"clean": True, "deduplicate": False}, ["a", "a", "b"]),
        ({"clean": False, "deduplicate": True}, ["a", "a\x07", "b"]),
    ],
)
def test_keys_turn_both_on_and_off(tmp_path: Path, keys: dict[str, bool], texts: list[str]) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": text} for text in ("a", "a\x07", "b")])
    assert [record.text for record in load(file, **keys).train] == texts
