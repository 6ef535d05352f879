"""A server on localhost, in a thread of the test that serves it."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Self


class LocalServer(ThreadingHTTPServer):
    """A server on a free port of localhost."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextmanager
    def serving(self) -> Iterator[Self]:
        with self:
            Thread(target=self.serve_forever, args=[0.02], daemon=True).start()
            yield self
            self.shutdown()
