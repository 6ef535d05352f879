"""Rows of a decoder that wait for an observation, while other rows decode."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from rlhf.rollout.decoders.decoder import Decoder, DrawingDecoder
from rlhf.rollout.scheduler import Request


class Continuation(NamedTuple):
    """The sequel of a turn of an episode: an observation, or the end of the episode."""

    row: int  # index of the episode in the batch
    observation: list[int] | None  # None if the episode has ended
    limit: int = 0  # number of token ids after the prompt at which the next turn is cut
    first_draw: int = 0  # column of the table of random draws for the next turn's first token


class Counterpart(Protocol):
    """A partner of the policy in episodes, which answers the policy's turns."""

    def submit_turn(self, request: Request) -> None:
        """Accept the turn that ``request`` has just finished, without waiting for an answer."""

    def continuations(self, *, wait: bool) -> list[Continuation]:
        """Return new continuations; with ``wait``, at least one, if a turn is unanswered."""


class ParkedRows:
    """Rows with requests that wait for an observation; implements ``PausedRows``.

    If the rows of a pass change one another's rounding, paused rows continue only when no row is
    active and all replies have arrived. Otherwise the rows of each pass, and with them the results,
    would depend on how long an environment takes.
    """

    def __init__(
        self, counterpart: Counterpart, decoder: Decoder | DrawingDecoder, places: range
    ) -> None:
        self._counterpart = counterpart
        self._decoder = decoder
        self._free = list(places)
        self._held: dict[int, tuple[int, Request]] = {}  # request index -> decoder row, request
        self._continued: list[tuple[Request, list[int]]] = []  # requests, and the tokens to add

    def __len__(self) -> int:
        return len(self._held)

    def add(self, row: int, request: Request) -> None:
        """Send the turn that ``request`` has finished to the counterpart, and park its row."""
        request.turn_ends.append(len(request.ids))
        self._counterpart.submit_turn(request)
        place = self._free.pop()
        self._decoder.move_row(row, place, columns=request.newest_position)
        self._held[request.index] = place, request

    def fetch_observations(self, *, is_idle: bool) -> None:
        """Take the continuations that may be used now; wait if no row decodes (``is_idle``)."""
        takes_some = self._decoder.rows_are_exact
        while (is_idle or takes_some) and len(self._held) > len(self._continued):
            wait = is_idle and not (takes_some and self._continued)
            for each in self._counterpart.continuations(wait=wait):
                place, request = self._held[each.row]
                if each.observation is None:
                    del self._held[each.row]
                    self._free.append(place)
                    continue
                newest = request.ids[-1:]
                request.extend(each.observation, limit=each.limit, first_draw=each.first_draw)
                self._continued.append((request, newest + each.observation))
            if takes_some:
                break
        self._continued.sort(key=lambda each: each[0].index)

    def select_continuing(self, most: int) -> list[tuple[Request, list[int]]]:
        """Return up to ``most`` requests for the next pass, and the tokens to add to their rows."""
        most = most if self._decoder.extends_together else 1
        chosen, self._continued = self._continued[:most], self._continued[most:]
        return chosen

    def move_back(self, request: Request, row: int, *, columns: int) -> None:
        """Move the row of ``request``, which holds ``columns`` tokens, back to ``row``."""
        place, _ = self._held.pop(request.index)
        self._free.append(place)
        self._decoder.move_row(place, row, columns=columns)
