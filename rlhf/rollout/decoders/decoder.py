"""What the rollout asks of a model.

Shapes: B = rows in use, N = prompts, P = prompt tokens, V = vocabulary.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


class Decoder(Protocol):
    """Runs one model on the rows of a preallocated key-value memory; its rows are 0, 1, 2, ..."""

    def prefill(self, ids_NP: Tensor, lengths: list[int], *, first_row: int) -> Tensor:
        """Take right-padded prompts, the first to ``first_row``; prompt i has lengths[i] tokens.

        Returns the logits (N, V) after each prompt's last token.
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


@runtime_checkable
class PackingDecoder(Decoder, Protocol):
    """One whose pass over the weights serves newest tokens and whole prompts together."""

    def decode_and_prefill(
        self, ids_B: Tensor, positions: list[int], ids_NP: Tensor, lengths: list[int]
    ) -> Tensor:
        """``decode`` of the rows 0 to B - 1, and ``prefill`` of the rows from B on.

        Returns the logits (B + N, V) of both.
        """
