"""The pages of a KV cache: which row uses which, decided on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from rlhf.rollout.decoders.attention import PagedAttention


class PageTable:
    """The pages of a KV cache that each row uses, and their table on the GPU.

    A step that the GPU has not finished may still write to a page that is freed here. Whatever uses
    the page next runs after this step.
    """

    def __init__(self, attention: PagedAttention) -> None:
        self._attention = attention
        self._columns = attention.page_columns
        self._rows: list[list[int]] = [[] for _ in attention.pages_RG]
        self._free = [*range(int(attention.has_shared_pages), attention.kv_cache.shape[2])]
        self._num_pages = len(self._free)
        self._is_uploaded = False

    def has_room(self, lengths: Iterable[int]) -> bool:
        """Return True if there are enough pages for rows that hold ``lengths`` tokens."""
        return sum(map(self._count_pages, lengths)) <= self._num_pages

    def extend(self, lengths: Mapping[int, int]) -> bool:
        """Add the pages that rows need to hold lengths[row] tokens.

        If too few are free, return False and add none. ``has_room`` says so beforehand.
        """
        missing = {
            row: max(0, self._count_pages(length) - len(self._rows[row]))
            for row, length in lengths.items()
        }
        if sum(missing.values()) > len(self._free):
            return False
        for row, count in missing.items():
            self._rows[row] += [self._free.pop() for _ in range(count)]
            self._is_uploaded &= not count
        return True

    def free(self, rows: Iterable[int]) -> None:
        """Free the pages of ``rows``."""
        for row in rows:
            if self._rows[row]:
                self._free += self._rows[row]
                self._rows[row] = []
                self._is_uploaded = False

    def keep(self, kept: Sequence[int], *, below: int) -> None:
        """Make the rows ``kept`` the rows 0, 1, ...; free all others ``below`` a number."""
        self.free({*range(below)} - {*kept})
        rows = [*(self._rows[row] for row in kept), *([] for _ in range(below - len(kept)))]
        self._is_uploaded &= rows == self._rows[:below]
        self._rows[:below] = rows

    def move(self, source: int, target: int) -> None:
        """Move the pages of row ``source`` to row ``target``, whose own pages are freed."""
        self.free([target])
        self._rows[source], self._rows[target] = [], self._rows[source]
        self._is_uploaded = False

    def copy(self, source: int, target: int, *, columns: int) -> None:
        """Copy the keys and values of ``columns`` tokens from row ``source`` to row ``target``."""
        firsts = range(0, columns, self._columns)
        for first, *pages in zip(firsts, self._rows[source], self._rows[target], strict=False):
            self._attention.copy_page(*pages, columns=min(self._columns, columns - first))

    def upload(self) -> None:
        """Copy the table to the GPU if it has changed; the host does not wait for this."""
        if self._is_uploaded:
            return
        pages_RG = self._attention.pages_RG
        # Unused rows write to a page that nobody reads. With a page per row a free one is left.
        unread = 0 if self._attention.has_shared_pages else min(self._free, default=0)
        width = pages_RG.shape[1]
        padded = [[*pages, *[unread] * (width - len(pages))] for pages in self._rows]
        pages_RG.copy_(torch.tensor(padded).pin_memory(), non_blocking=True)
        self._is_uploaded = True

    def _count_pages(self, length: int) -> int:
        return -(-length // self._columns)
