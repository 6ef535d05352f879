"""Stop texts, which end a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARGIN = 4  # extra tokens to decode: the first tokens may be parts of a character


class StopTexts:
    """A detector of stop texts in a response that grows token by token.

    It is falsy if there are no ``texts``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = list(texts)
        # A token has at least one byte, so this many tokens contain any stop text that just ended.
        self._num_tokens = max((len(text.encode()) for text in texts), default=0) + MARGIN

    def __bool__(self) -> bool:
        return bool(self._texts)

    def completes_stop_text(self, response_ids: list[int]) -> bool:
        """Return True if the last token completes a stop text; call this after every token."""
        if not self._texts:
            return False
        text = self._tokenizer.decode(
            response_ids[-self._num_tokens :],
            skip_special_tokens=False,  # a special token can be a stop text too
            clean_up_tokenization_spaces=False,
        )
        return any(stop in text for stop in self._texts)
