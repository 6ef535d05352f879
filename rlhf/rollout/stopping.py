"""Texts that end a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARGIN = 4  # tokens decoded beyond the longest text: the first ones may be parts of a character


class StopTexts:
    """Says of a response that grows token by token whether it has come to one of ``texts``.

    False where there are no texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = list(texts)
        # A token stands for one byte at least, so a text that ends in the last token is in these.
        self._num_tokens = max((len(text.encode()) for text in texts), default=0) + MARGIN

    def __bool__(self) -> bool:
        return bool(self._texts)

    def ends(self, response_ids: list[int]) -> bool:
        """True where the last token completes a stop text; the earlier ones were asked about."""
        if not self._texts:
            return False
        text = self._tokenizer.decode(
            response_ids[-self._num_tokens :],
            skip_special_tokens=False,  # a special token is a stop text like any other
            clean_up_tokenization_spaces=False,
        )
        return any(stop in text for stop in self._texts)
