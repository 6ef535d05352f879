"""A server with the API of OpenAI whose judge never gives the same number twice in a row."""

import json
import time
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path

from tests.rewards.endpoint import Endpoint, EndpointHandler

RUBRIC = """
criteria:
  - {name: clear, question: "Is it clear?", weight: 3}
  - {name: short, question: "Is it short?", scale: [10, 0]}
"""
# What the judge answers to the next requests, by word; "" stands for a verdict.
ANSWERS = {"prose": "I like it.", "outside": '{"clear": 9, "short": 0}', "few": '{"clear": 5}'}


class JudgeServer(Endpoint):
    """A judge on localhost."""

    path = "v1"

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.clear = count(1)


def judge_server() -> AbstractContextManager[JudgeServer]:
    return JudgeServer().serving()


def write_rubric(folder: Path, text: str = RUBRIC) -> str:
    (folder / "rubric.yaml").write_text(text)
    return str(folder / "rubric.yaml")


class _Handler(EndpointHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        _, fault = self.take_request()
        if self.answers_slowly(fault):
            return
        if fault == "sleep":
            time.sleep(30)  # nobody waits for an answer any more
        verdict = json.dumps({"clear": next(self.server.clear) % 5 + 1, "short": 0})
        answers = ANSWERS | {"fenced": f"I think:\n```json\n{verdict}\n```\nDone."}
        answers |= {
            "padded": verdict + " " * (1 << 20),
            "long": verdict[:-1] + " " * (1 << 15) + "}",
        }
        message = {"role": "assistant", "content": answers.get(fault, verdict)}
        answer = {"choices": [{"message": {} if fault == "empty" else message}]}
        body = json.dumps(answer).encode()
        self.send_response(int(fault) if fault.isdecimal() else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
