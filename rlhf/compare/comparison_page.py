"""The page: a prompt, two anonymous answers, and a button for each choice.

The page is plain HTML without scripts. Which model gave which answer stays in this process until
the last pair is judged. Other sites that the browser shows, and other users of this machine, must
neither read the page nor choose: its address holds a random token, and requests from pages of
other sites are refused.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Lock
from typing import Any
from urllib.parse import parse_qs

from rlhf.base.errors import ConfigError, RlhfError
from rlhf.compare.answer_pairs import AnswerPair
from rlhf.compare.preference_file import PreferenceFile, Verdict, WinRate
from rlhf.report.page import render_template

HOST = "127.0.0.1"
PORTS = range(7860, 7960)
NAMES = (HOST, "localhost")  # names of this machine; requests to other names are refused
LENGTH = "[0-9]{1,3}"  # pattern of Content-Length: at most 999 bytes, where a choice has 30
SECONDS = 10  # until a connection that sends nothing is closed
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "same-origin",  # no-referrer would hide the form's own origin too
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
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
        self._num_done = 0
        self._lock = Lock()

    @property
    def num_done(self) -> int:
        """Return the number of pairs that have been judged or skipped."""
        return self._num_done

    @property
    def pair(self) -> AnswerPair | None:
        """Return the pair to judge; None after the last pair."""
        return self._pairs[self._num_done] if self._num_done < len(self._pairs) else None

    @property
    def progress(self) -> str:
        """Return the number of the shown pair as text, such as "3 of 20"."""
        return f"{self._num_done + 1} of {len(self._pairs)}"

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
            if place == self._num_done and self.pair is not None:
                if verdict is not None:
                    self._file.add(self.pair, verdict)
                self._num_done += 1


def render_comparison(comparison: Comparison) -> str:
    """Return the HTML of the next pair, or of the result after the last pair."""
    if comparison.pair is None:
        return _render_template(result=str(comparison.result))
    return _render_template(
        pair=comparison.pair, progress=comparison.progress, place=comparison.num_done
    )


class ComparisonServer(ThreadingTCPServer):
    """A server that shows the page on this machine only, to users who know its ``address``.

    Raises:
        ConfigError: if the port is taken or may not be used.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, comparison: Comparison, port: int | None) -> None:
        self.comparison = comparison
        self.path = f"/{secrets.token_urlsafe(16)}"
        self._bind_first(PORTS if port is None else [port])
        self.address = f"http://{HOST}:{self.server_address[1]}{self.path}"

    def _bind_first(self, ports: Sequence[int]) -> None:
        """Listen at the first port that is free."""
        for port in ports:
            try:
                return super().__init__((HOST, port), _Request)
            except (OSError, OverflowError) as error:
                reason = error
        raise ConfigError(f"--port {ports[-1]}: {reason}; choose another") from reason

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of a bug; ignore a connection that the browser closed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Request(BaseHTTPRequestHandler):
    """One request: the page, a choice, or a refusal."""

    server: ComparisonServer
    timeout = SECONDS

    def do_GET(self) -> None:
        if self._is_allowed():
            self._send(HTTPStatus.OK, render_comparison(self.server.comparison))

    def do_POST(self) -> None:
        if self._is_allowed():
            self._send(*self._store_choice())

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

    def _is_allowed(self) -> bool:
        """Return True if the page or its user sent the request; otherwise send a refusal."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if host.partition(":")[0] not in NAMES or origin not in {None, f"http://{host}"}:
            self._send(*_refusal_response(HTTPStatus.FORBIDDEN))
        elif not secrets.compare_digest(self.path.encode(), self.server.path.encode()):
            self._send(*_refusal_response(HTTPStatus.NOT_FOUND))
        else:
            return True
        return False

    def _send(self, status: HTTPStatus, text: str) -> None:
        body = text.encode(errors="replace")  # answers may hold what UTF-8 cannot encode
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status is HTTPStatus.SEE_OTHER:
            self.send_header("Location", self.server.path)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Return the value of the header Server, which reveals nothing about this machine."""
        return "rlhf"

    def log_message(self, *_: object) -> None:
        """Print no line for each request."""


def _refusal_response(status: HTTPStatus) -> tuple[HTTPStatus, str]:
    return status, _render_template(message=f"{status.value} {status.phrase}")


def _render_template(**shown: object) -> str:
    """Return the page with a ``pair``, the ``result`` or a ``message``."""
    return render_template("comparison.html", package="rlhf.compare", buttons=BUTTONS, **shown)
