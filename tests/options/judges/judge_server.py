"""A server with the API of OpenAI whose judge never gives the same number twice in a row."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

RUBRIC = """
criteria:
  - {name: clear, question: "Is it clear?", weight: 3}
  - {name: short, question: "Is it short?", scale: [10, 0]}
"""
# What the judge answers to the next requests, by word; "" stands for a verdict.
ANSWERS = {"prose": "I like it.", "outside": '{"clear": 9, "short": 0}', "few": '{"clear": 5}'}


class JudgeServer(ThreadingHTTPServer):
    """A server on localhost; ``faults`` are taken from the front, one for each request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.clear = count(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    with JudgeServer() as server:
        Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        yield server
        server.shutdown()


def write_rubric(folder: Path, text: str = RUBRIC) -> str:
    (folder / "rubric.yaml").write_text(text)
    return str(folder / "rubric.yaml")


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        self.server.tokens.append(self.headers["Authorization"])
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "sleep":
            time.sleep(30)  # nobody waits for an answer any more
        verdict = json.dumps({"clear": next(self.server.clear) % 5 + 1, "short": 0})
        message = {"role": "assistant", "content": ANSWERS.get(fault, verdict)}
        answer = {"choices": [{"message": {} if fault == "empty" else message}]}
        body = json.dumps(answer).encode()
        self.send_response(int(fault) if fault.isdecimal() else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""
