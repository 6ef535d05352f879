"""Clean texts, and drop examples that repeat an earlier example."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

from rlhf.data.records import Message, RawDataset, Record

LINE_ENDS = re.compile(r"[ \t]*(?:\r\n?|[\n\v\f\x85])")
# Control characters other than whitespace, and lone surrogates, which UTF-8 cannot encode.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")
REPEATED = "repeats an earlier example"


def clean_text(text: str) -> str:
    """Return ``text`` in Unicode NFC, with newlines as line ends and without control characters.

    Trailing whitespace of inner lines is removed too. Whitespace at the end of the text stays,
    since a prompt or a response may need it.
    """
    return LINE_ENDS.sub("\n", UNPRINTABLE.sub("", unicodedata.normalize("NFC", text)))


def clean_dataset(dataset: RawDataset) -> RawDataset:
    """Return ``dataset`` with clean texts; drop and count examples that are unusable afterwards."""
    left_out = Counter(dataset.left_out)
    train = _clean_records(dataset.train, left_out)
    held_out = None if dataset.eval is None else _clean_records(dataset.eval, left_out)
    return dataset._replace(train=train, eval=held_out, left_out=left_out)


def _clean_records(records: list[Record], left_out: Counter[str]) -> list[Record]:
    kept = []
    for record in records:
        texts = [None if part is None else clean_text(part) for part in record.texts]
        said = record.messages and tuple(Message(m[0], clean_text(m[1])) for m in record.messages)
        prompt, chosen, rejected, text = texts
        cleaned = record._replace(
            prompt=prompt, chosen=chosen, rejected=rejected, text=text, messages=said
        )
        reason = _why_unusable(cleaned)
        if reason:
            left_out[f"{reason} after cleaning"] += 1
        else:
            kept.append(cleaned)
    return kept


def _why_unusable(record: Record) -> str | None:
    for name, part in zip(Record._fields, record.texts, strict=False):
        if part is not None and not part.strip():
            return f"{name} is empty"
    if record.rejected is not None and record.chosen == record.rejected:
        return "chosen equals rejected"
    return None


def fingerprint(*texts: str | None) -> bytes:
    """Return a 16-byte hash that is equal for texts that differ only in whitespace and case."""
    same = (None if text is None else " ".join(text.split()).casefold() for text in texts)
    return blake2b(repr(tuple(same)).encode(), digest_size=16).digest()


def drop_repeated_examples(datasets: Sequence[RawDataset]) -> list[RawDataset]:
    """Return ``datasets`` with only the first occurrence of each example in all of them.

    Training and held-out examples are compared separately: ``divide_over_phases`` later removes
    training examples whose prompt is held out.
    """
    seen_train: set[bytes] = set()
    seen_eval: set[bytes] = set()
    found = []
    for each in datasets:
        train = _drop_repeated(each.train, seen_train)
        held_out = None if each.eval is None else _drop_repeated(each.eval, seen_eval)
        repeated = len(each.train) - len(train) + len(each.eval or ()) - len(held_out or ())
        left_out = each.left_out + Counter({REPEATED: repeated})
        found.append(each._replace(train=train, eval=held_out, left_out=left_out))
    return found


def _drop_repeated(records: list[Record], seen: set[bytes]) -> list[Record]:
    kept = []
    for record in records:
        mark = fingerprint(*record.texts)
        if mark not in seen:
            seen.add(mark)
            kept.append(record)
    return kept
