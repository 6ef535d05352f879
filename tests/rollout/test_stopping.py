"""Stop texts, asked about after every token, against a search in the whole response's text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rlhf.models.tokenizers import train_tokenizer
from rlhf.rollout.sampling import StopTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG = "words and more words, é and 漢字, and then some more of the same. "


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    # "word" and the like are one token each; what has not been seen is one token per byte.
    return train_tokenizer(["words and more words, the same"] * 9, vocab_size=290)


def first_end(stop: StopTexts, ids: list[int]) -> int | None:
    """Tokens there are when ``stop`` first says that the response has ended."""
    return next((n for n in range(1, len(ids) + 1) if stop.completes_stop_text(ids[:n])), None)


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        (LONG + "\nHuman: hi", ["\nHuman:"]),
        (LONG + "the same", [" same", "nothing"]),
        (LONG + "漢字", ["字"]),  # ends within the bytes of a character
        (LONG + "a" * 40, ["a" * 30]),  # 30 tokens
        (LONG + "Z" + "漢" * 9, ["Z" + "漢" * 8]),  # 25 tokens
        ("end at once", ["e"]),
        (LONG, ["never there"]),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_text(
    tokenizer: PreTrainedTokenizerBase, text: str, stops: list[str]
) -> None:
    ids = tokenizer(text).input_ids
    counts = range(1, len(ids) + 1)
    expected = next((n for n in counts if any(s in tokenizer.decode(ids[:n]) for s in stops)), None)
    assert first_end(StopTexts(tokenizer, stops), ids) == expected
    assert (expected is None) == ("never there" in stops)


def test_a_text_within_a_token_ends_a_response(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("more words").input_ids
    assert [tokenizer.decode(token) for token in ids] == ["mor", "e", " words"]
    assert first_end(StopTexts(tokenizer, ["o"]), ids) == 1
    assert first_end(StopTexts(tokenizer, ["wo"]), ids) == 3


def test_a_special_token_is_a_text_too(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [*tokenizer("more").input_ids, tokenizer.eos_token_id]
    assert first_end(StopTexts(tokenizer, [tokenizer.eos_token]), ids) == len(ids)
