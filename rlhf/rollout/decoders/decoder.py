"""What the rollout asks of a model. Shapes: B = rows, P = prompt tokens, V = vocabulary."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Decoder(Protocol):
    """Runs one model on the rows of a preallocated key-value memory; its rows are 0, 1, 2, ..."""

    def prefill(self, ids_BP: Tensor, lengths: list[int], *, first_row: int) -> Tensor:
        """Take right-padded prompts, row i of lengths[i] tokens, into the rows from ``first_row``.

        Returns the logits (B, V) after each prompt's last token.
        """

    def decode(self, ids_B: Tensor, positions: list[int]) -> Tensor:
        """Take one token for each of the rows 0 to B - 1, row i's at position positions[i].

        Returns the logits (B, V) after it.
        """

    def copy_row(self, source: int, target: int, *, columns: int) -> None:
        """Make row ``target`` remember what row ``source`` does, which is ``columns`` tokens.

        For the ends of rows (the last row takes the place of one that left) and for several
        responses to one prompt.
        """
