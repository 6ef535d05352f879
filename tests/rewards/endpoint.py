"""An HTTP endpoint that scores responses, and fails in the ways that a test asks for."""

import json
import time
from contextlib import AbstractContextManager, suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.local_server import LocalServer


class Endpoint(LocalServer):
    """A server on localhost; ``faults`` are taken from the front, one for each request."""

    path = "score"

    def __init__(self, handler: "type[EndpointHandler] | None" = None) -> None:
        super().__init__(handler or _Handler)
        self.faults: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []

    @property
    def url(self) -> str:
        return f"{super().url}/{self.path}"


def endpoint() -> AbstractContextManager[Endpoint]:
    return Endpoint().serving()


class EndpointHandler(BaseHTTPRequestHandler):
    """Takes a request down, and the fault with which it is answered."""

    server: Endpoint

    def take_request(self) -> tuple[dict[str, Any], str]:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.tokens.append(self.headers["Authorization"])
        return body, self.server.faults.pop(0) if self.server.faults else ""

    def answers_slowly(self, fault: str) -> bool:
        """Answer as the fault "drip", "drip head" or "429 SECONDS" says; False: it is another."""
        if fault.startswith("429 "):
            self.send_response(429)
            self.send_header("Retry-After", fault.removeprefix("429 "))
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif fault.startswith("drip"):
            self.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"\r\n" * (fault == "drip"))
            with suppress(OSError):  # the other side has waited enough
                while True:
                    self.wfile.write(b"1")
                    time.sleep(0.05)
        return fault.startswith(("429 ", "drip"))

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class _Handler(EndpointHandler):
    def do_POST(self) -> None:
        body, fault = self.take_request()
        if self.answers_slowly(fault):
            return
        scores: Any = [float(len(each)) for each in body["responses"]]
        match fault:
            case "sleep":
                time.sleep(30)  # nobody waits for an answer any more
                return
            case "nan":
                scores[0] = float("nan")
            case "length":
                scores = [*scores, 1.0]
            case "text":
                scores = "high"
            case "texts":
                scores = ["1.0"] * len(scores)
            case "true":
                scores = [True] * len(scores)
            case "huge":
                scores = [10**400] * len(scores)
            case "away":
                self.send_response(302)
                self.send_header("Location", self.server.url)
                self.end_headers()
                return
            case "endless":
                self.send_response(200)
                self.end_headers()
                with suppress(OSError):  # the other side has heard enough
                    while True:
                        self.wfile.write(b" " * (1 << 20))
                return
        answer = json.dumps({"scores": scores}).encode()
        self.send_response(500 if fault == "500" else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if fault == "cut":
            self.wfile.write(answer[:3])
            self.wfile.flush()
            self.connection.close()
            return
        self.wfile.write(answer)
