"""The interface through which the rollout prefills and decodes.

Shapes: B = rows in use, N = prompts or requests, P = prompt tokens, T = response tokens, V =
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class Newest(NamedTuple):
    """The newest token of a row, from which its next token is decoded."""

    token: int
    position: int
    request: int  # row of the random draws
    step: int  # column of the random draws: counts the drawn tokens


class Texts(NamedTuple):
    """Right-padded texts to prefill: prompts, or texts to add to rows that hold tokens already."""

    ids_NP: Tensor
    lengths: list[int]  # in tokens
    starts: list[int] | None = None  # number of tokens that each row holds already; None: 0


class KvCache(Protocol):
    """A model with a preallocated KV cache, whose rows are numbered 0, 1, 2, ...

    ``rows_are_exact``: the logits of a row are bit-identical whatever else is in the forward pass.
    ``extends_together``: one prefill may extend several rows whose lengths differ.
    """

    rows_are_exact: bool
    extends_together: bool

    def prefill(self, texts: Texts, *, first_row: int) -> Tensor:
        """Prefill ``texts`` into the rows from ``first_row`` on.

        Returns the logits (N, V) after each text's last token.
        """

    def has_room(self, lengths: Sequence[int]) -> bool:  # noqa: ARG002
        """Return True if the KV cache can hold rows of these ``lengths``, in tokens.

        In this implementation each row has room for the longest text.
        """
        return True

    def move_row(self, source: int, target: int, *, columns: int) -> None:
        """Move row ``source``, which holds ``columns`` tokens, to row ``target``.

        Afterwards the content of row ``source`` is undefined. This implementation copies the row.
        """
        self.copy_row(source, target, columns=columns)

    def copy_row(self, source: int, target: int, *, columns: int) -> None:
        """Copy the KV cache of row ``source``, which holds ``columns`` tokens, to row ``target``.

        This is used for several responses to one prompt.
        """


class Decoder(KvCache, Protocol):
    """A decoder that returns logits."""

    def decode(self, ids_B: Tensor, positions: list[int]) -> Tensor:
        """Decode one token of each row i from 0 to B - 1: ids_B[i] at position positions[i].

        Returns the logits (B, V) after these tokens.
        """


@runtime_checkable
class DrawingDecoder(KvCache, Protocol):
    """A decoder that draws the next tokens itself, so that a step waits for the GPU only once."""

    @property
    def is_ahead(self) -> bool:
        """Return True if a step was launched whose tokens nobody has read."""

    def decode_and_draw(
        self, newest: list[Newest], draws_NT: Tensor, *, leads: bool = True
    ) -> Tensor:
        """Decode the newest token of each of the rows 0 to B - 1, and draw the next token.

        ``draws_NT`` is the same tensor in all steps of a rollout. With ``leads`` the decoder may
        launch the next step of these rows ahead. Returns the tokens and their log-probs as
        ``rlhf.rollout.sampling.stack_token_logprobs`` does.
        """


@runtime_checkable
class PackingDecoder(Decoder, Protocol):
    """A decoder that can prefill new prompts and decode running rows in the same forward pass."""

    def decode_and_prefill(self, ids_B: Tensor, positions: list[int], texts: Texts) -> Tensor:
        """Decode the rows 0 to B - 1, and prefill ``texts`` into the rows from B on.

        Returns the logits (B + N, V): first of the B decoded rows, then of the N texts.
        """
