"""Stop texts, asked about after every token, against a search in the whole response's text."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlhf.models.tokenizers import train_tokenizer
from rlhf.rollout.sampling import MARGIN, StopTexts

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


def byte_fallback() -> PreTrainedTokenizerBase:
    """Pieces with a sign for the space before them; single bytes for what has no piece."""
    pieces = "\u2581 \u2581word s \u2581and o r e \u2581m H : um a n".split()
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = Tokenizer(models.Unigram([(name, 0.0) for name in names], 0, byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_pieces() -> PreTrainedTokenizerBase:
    names = ["[UNK]", "word", "##s", "and", "##o", "H", "##um", "##an", ":", "##:"]
    tokenizer = Tokenizer(models.WordPiece({name: at for at, name in enumerate(names)}))
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


STOPS = ["n:", "s ", "\u5b57", "\n\n", "H", "or", "\ufffd", " a", "\u00e9e", "word and", "<0x"]


@pytest.mark.parametrize("kind", ["bytes", "fallback", "words"])
def test_undecoded_tokens_complete_no_text(kind: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Any token may follow any other, as in a response: half characters, pieces of texts."""
    made = {"bytes": lambda: tokenizer, "fallback": byte_fallback, "words": word_pieces}[kind]()
    rng, size = random.Random(kind), len(made)
    common = [i for i in range(size) if set(made.decode([i])) & set("".join(STOPS))]
    common += made("\u5b57\u00e9", add_special_tokens=False).input_ids if kind != "words" else []
    ends = 0
    for stop in STOPS:
        texts = StopTexts(made, [stop])
        for _ in range(40):
            ids = [rng.choice(common if rng.random() < 0.8 else range(size)) for _ in range(30)]
            counts = range(1, len(ids) + 1)
            first = len(stop.encode()) + MARGIN
            texts_N = [made.decode(ids[max(0, n - first) : n]) for n in counts]
            expected = next((n for n in counts if stop in texts_N[n - 1]), None)
            assert first_end(texts, ids) == expected, (stop, ids)
            ends += expected is not None
    assert ends > 20


def test_only_tokens_that_may_complete_a_text_are_decoded(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokenizer("words and more words, the same" * 20).input_ids
    decoded = []
    decode = tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, **how: decoded.append(ids) or decode(ids, **how)
    )
    stop = StopTexts(tokenizer, ["Human:"])
    assert first_end(stop, ids) is None
    assert len(decoded) == len(set(ids))  # each kind of token once
    assert first_end(stop, ids) is None
    assert len(decoded) == len(set(ids))
    assert stop.completes_stop_text([*ids, *tokenizer("Human:").input_ids])
    assert not stop.completes_stop_text(tokenizer("Human:").input_ids, first=1)
