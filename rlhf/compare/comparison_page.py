"""The page: a prompt, two anonymous answers, and a button for each choice.

The page is plain HTML without scripts. Which model gave which answer stays in this process until
the last pair is judged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from threading import Lock
from urllib.parse import parse_qs

from rlhf.base.errors import RlhfError
from rlhf.compare.answer_pairs import AnswerPair
from rlhf.compare.preference_file import PreferenceFile, Verdict, WinRate
from rlhf.report.page import LocalRequest, LocalServer, render_template

LENGTH = "[0-9]{1,3}"  # pattern of Content-Length: at most 999 bytes, where a choice has 30
BUTTONS = {
    "A is better": Verdict.a,
    "B is better": Verdict.b,
    "Tie": Verdict.tie,
    "Both bad": Verdict.both_bad,
    "Skip": None,
}


class Comparison:
    """The pairs to judge one after the other, and the file that stores the choices."""

    def __init__(
        self, pairs: Sequence[AnswerPair], models: tuple[str, str], file: PreferenceFile
    ) -> None:
        done = {(each.prompt, each.answers) for each in file.read_choices()}
        self._pairs = [pair for pair in pairs if pair.key not in done]
        self._models = models
        self._file = file
        self.num_done = 0  # pairs that have been judged or skipped
        self._lock = Lock()

    @property
    def pair(self) -> AnswerPair | None:
        """Return the pair to judge; None after the last pair."""
        return self._pairs[self.num_done] if self.num_done < len(self._pairs) else None

    @property
    def progress(self) -> str:
        """Return the number of the shown pair as text, such as "3 of 20"."""
        return f"{self.num_done + 1} of {len(self._pairs)}"

    @property
    def result(self) -> WinRate:
        """Return the win rate of the first model, over all choices in the file."""
        return WinRate.from_choices(self._models, list(self._file.read_choices()))

    def judge(self, verdict: Verdict | None, *, place: int) -> None:
        """Store the verdict on the pair at ``place`` unless that pair is done; None: skip the pair.

        Raises:
            RlhfError: if the choice cannot be written.
        """
        with self._lock:
            if place == self.num_done and self.pair is not None:
                if verdict is not None:
                    self._file.add(self.pair, verdict)
                self.num_done += 1


def render_comparison(comparison: Comparison) -> str:
    """Return the HTML of the next pair, or of the result after the last pair."""
    if comparison.pair is None:
        return _render_template(result=str(comparison.result))
    return _render_template(
        pair=comparison.pair, progress=comparison.progress, place=comparison.num_done
    )


class ComparisonServer(LocalServer):
    """A server of the page of one comparison."""

    def __init__(self, comparison: Comparison, port: int | None) -> None:
        self.comparison = comparison
        super().__init__(_Request, port)


class _Request(LocalRequest):
    """One request: the page, a choice, or a refusal."""

    server: ComparisonServer
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    )

    def do_GET(self) -> None:
        if (refused := self.refusal(self.path)) is not None:
            self.send(*_refusal_response(refused))
        else:
            self.send(HTTPStatus.OK, render_comparison(self.server.comparison))

    def do_POST(self) -> None:
        refused = self.refusal(self.path)
        status, text = self._store_choice() if refused is None else _refusal_response(refused)
        location = {"Location": self.server.path} if status is HTTPStatus.SEE_OTHER else {}
        self.send(status, text, headers=location)

    def _store_choice(self) -> tuple[HTTPStatus, str]:
        """Store the choice that the form sent; return the status and the text of the answer."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(LENGTH, length):
            return _refusal_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        sent = parse_qs(self.rfile.read(int(length)).decode(errors="replace"))
        place, verdict = (sent.get(name, [""])[0] for name in ("place", "verdict"))
        if not place.isdecimal() or verdict not in BUTTONS:
            return _refusal_response(HTTPStatus.BAD_REQUEST)
        try:
            self.server.comparison.judge(BUTTONS[verdict], place=int(place))
        except RlhfError as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, _render_template(message=str(error))
        return HTTPStatus.SEE_OTHER, ""  # to the page, so that reloading it sends no choice again


def _refusal_response(status: HTTPStatus) -> tuple[HTTPStatus, str]:
    return status, _render_template(message=f"{status.value} {status.phrase}")


def _render_template(**shown: object) -> str:
    """Return the page with a ``pair``, the ``result`` or a ``message``."""
    return render_template("comparison.html", package="rlhf.compare", buttons=BUTTONS, **shown)
