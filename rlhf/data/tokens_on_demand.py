"""Token ids of stored records, which are encoded when a step reads them.

To encode two million examples takes many minutes, and only the number of usable examples must be
known before the first step. A byte-level tokenizer never makes more tokens than a text has UTF-8
bytes, so a plain example of few bytes is usable. The others are encoded to find out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.base.errors import DataError
from rlhf.config.choices import Phase
from rlhf.data.records import Record
from rlhf.data.stored import Numbers, facts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encode = Callable[[list[tuple[int, Record]]], tuple[dict[str, list[Any]], Counter[str]]]
MOST_DOUBTFUL = 50_000  # if more examples must be encoded, all are, and their ids are cached
KEPT_WHOLE = {"Split", "Digits", "Punctuation"}  # pre-tokenizers that add no bytes


class TokensOnDemand:
    """The usable examples of one side of a phase; it is read like a ``datasets.Dataset``."""

    def __init__(self, records: Sequence[Record], encode: Encode, rows: Numbers) -> None:
        """Store the row of each example in ``records``; a row may have several examples."""
        self._records, self._encode, self._row_N = records, encode, rows
        self._turn_N = np.arange(len(rows)) - np.searchsorted(rows, rows)  # within its row

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._row_N)

    def __getitem__(self, wanted: Sequence[int] | str) -> Any:
        """Return the columns of the examples ``wanted``, or one column of all examples."""
        if isinstance(wanted, str):
            return self._row_N.tolist() if wanted == "row" else _Column(self, wanted)
        rows, turns = self._row_N[wanted].tolist(), self._turn_N[wanted].tolist()
        columns, _ = self._encode([(row, self._records[row]) for row in dict.fromkeys(rows)])
        first: dict[int, int] = {}
        for place, row in enumerate(columns["row"]):
            first.setdefault(row, place)
        places = [first[row] + turn for row, turn in zip(rows, turns, strict=True)]
        return {name: [values[place] for place in places] for name, values in columns.items()}


class _Column:
    """One column of all examples; a slice of it is encoded when it is read."""

    def __init__(self, examples: TokensOnDemand, name: str) -> None:
        self._examples, self._name = examples, name

    def __getitem__(self, part: slice) -> list[Any]:
        values: list[Any] = self._examples[range(*part.indices(len(self._examples)))][self._name]
        return values


def find_usable(
    records: Sequence[Record],
    *,
    phase: Phase,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    encode: Encode,
) -> tuple[TokensOnDemand, Counter[str]] | None:
    """Return the usable examples of ``records``, and the numbers of the others by reason.

    Return None if too many examples must be encoded to find out, or their template refuses them.
    """
    answer_bytes, is_plain = facts_of(records, "answer_bytes"), facts_of(records, "is_plain")
    prompt_bytes = facts_of(records, "prompt_bytes")
    most_tokens = prompt_bytes.astype(np.int64) + tokenizer.num_special_tokens_to_add()
    has_prompt = prompt_bytes > 0
    if phase is Phase.sft:
        most_tokens += answer_bytes + 1  # the end token
        has_text = facts_of(records, "has_text")
        is_plain &= np.where(has_text, ~has_prompt, has_prompt) & (answer_bytes > 0)
    else:
        is_plain &= has_prompt
    is_sure = is_plain & (most_tokens <= limit) & is_byte_level(tokenizer)
    doubtful = np.flatnonzero(~is_sure)
    if len(doubtful) > MOST_DOUBTFUL:
        return None
    try:
        columns, left_out = encode([(row, records[row]) for row in doubtful.tolist()])
    except DataError:  # most of these few cannot be shown; perhaps not most of all
        return None
    rows = np.concatenate([np.flatnonzero(is_sure), np.array(columns["row"], np.int64)])
    return TokensOnDemand(records, encode, np.sort(rows)), left_out


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a text in NFC never has more tokens than UTF-8 bytes, by its definition."""
    if not tokenizer.is_fast:
        return False
    known = json.loads(tokenizer.backend_tokenizer.to_str())
    splitter = known["pre_tokenizer"] or {}
    parts = splitter.get("pretokenizers", [splitter])
    normalizer = known["normalizer"] or {"type": "NFC"}
    return (
        known["model"]["type"] == "BPE"
        and normalizer == {"type": "NFC"}
        and any(part.get("type") == "ByteLevel" for part in parts)
        and all(
            part.get("type") in KEPT_WHOLE
            or (part.get("type") == "ByteLevel" and not part["add_prefix_space"])
            for part in parts
        )
    )
