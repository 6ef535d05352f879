"""Serve pages to the user of this machine, and to nobody else.

Other sites that the browser shows, and other users of this machine, must neither read a page nor
use it: the address holds a random token, and requests with another Host (a name that was pointed
here) or from pages of other sites are refused.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, ClassVar

from rlhf.base.errors import ConfigError

HOST = "127.0.0.1"
PORTS = range(7860, 7960)
NAMES = (HOST, "localhost")  # names of this machine; requests to other names are refused
SECONDS = 10  # until a connection that sends nothing is closed
HEADERS = {
    "Referrer-Policy": "same-origin",  # no-referrer would hide the form's own origin too
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class LocalServer(ThreadingTCPServer):
    """A server on this machine only, whose ``path`` no other user can guess.

    ``port`` None takes the first free port of ``PORTS``.

    Raises:
        ConfigError: if the port is taken or may not be used.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, handler: type[LocalRequest], port: int | None) -> None:
        self.path = f"/{secrets.token_urlsafe(16)}"
        self._bind_first(handler, PORTS if port is None else [port])
        self.address = f"http://{HOST}:{self.server_address[1]}{self.path}"

    def _bind_first(self, handler: type[LocalRequest], ports: Sequence[int]) -> None:
        """Listen at the first port that is free."""
        for port in ports:
            try:
                return super().__init__((HOST, port), handler)
            except (OSError, OverflowError) as error:
                reason = error
        raise ConfigError(f"--port {ports[-1]}: {reason}; choose another") from reason

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of a bug; ignore a connection that the browser closed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class LocalRequest(BaseHTTPRequestHandler):
    """A request to a ``LocalServer``; subclasses answer it unless ``refusal`` returns a status."""

    server: LocalServer
    timeout = SECONDS
    policy: ClassVar[str]  # the Content-Security-Policy of what the subclass sends

    def refusal(self, path: str) -> HTTPStatus | None:
        """Return why the request is refused; None if the page or its user sent it to ``path``."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if host.partition(":")[0] not in NAMES or origin not in {None, f"http://{host}"}:
            return HTTPStatus.FORBIDDEN
        if not secrets.compare_digest(path.encode(), self.server.path.encode()):
            return HTTPStatus.NOT_FOUND
        return None

    def send(
        self,
        status: HTTPStatus,
        text: str,
        *,
        kind: str = "text/html",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send an answer whose body is ``text``, of the MIME type ``kind``."""
        body = text.encode(errors="replace")  # answers may hold what UTF-8 cannot encode
        self.send_response(status)
        sent = {"Content-Type": f"{kind}; charset=utf-8", "Content-Security-Policy": self.policy}
        for name, value in {**sent, **HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Return the value of the header Server, which reveals nothing about this machine."""
        return "rlhf"

    def log_message(self, *_: object) -> None:
        """Print no line for each request."""
