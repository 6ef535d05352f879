"""A server with as much of Weights & Biases' API as wandb 0.31 needs to send a run."""

import json
import re
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.local_server import LocalServer

WAS_STARTED = '{"t": 1}'  # wandb resumes no run without this key
PROJECT = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}


class WandbServer(LocalServer):
    """A server on localhost that keeps the rows and the summary of each run."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.summaries: dict[str, str] = {}

    def answer(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the data with which GraphQL answers an operation."""
        name = given.get("name")
        match operation:
            case "UpsertBucket":
                bucket = {"id": name, "name": name, "displayName": name, "project": PROJECT}
                bucket |= {"historyLineCount": len(self.rows.get(str(name), ()))}
                return {"upsertBucket": {"bucket": bucket, "inserted": name not in self.rows}}
            case "RunResumeStatus":
                return {"model": PROJECT | {"bucket": self._describe_run(str(name))}}
            case "CreateRunFiles":
                files = [{"name": each, "uploadUrl": f"{self.url}/up"} for each in given["files"]]
                return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
            case "Viewer":
                teams: dict[str, Any] = {"edges": []}
                return {"viewer": {"id": "v", "entity": "e", "flags": "{}", "teams": teams}}
        return {}

    def _describe_run(self, name: str) -> dict[str, Any] | None:
        if not (rows := self.rows.get(name)):
            return None
        counts = {"historyLineCount": len(rows), "logLineCount": 0, "eventsLineCount": 0}
        tails = {"historyTail": json.dumps([json.dumps(rows[-1])]), "eventsTail": "[]"}
        texts = {"summaryMetrics": self.summaries[name], "config": "{}", "wandbConfig": WAS_STARTED}
        return {"id": name, "name": name, "displayName": name, "tags": []} | counts | tails | texts

    def take_stream(self, run: str, files: dict[str, Any]) -> None:
        """Store new rows and the latest summary of a run."""
        rows = self.rows.setdefault(run, [])
        if (history := files.get("wandb-history.jsonl")) is not None:
            rows[history["offset"] :] = map(json.loads, history["content"])
        if (summary := files.get("wandb-summary.json")) is not None:
            self.summaries[run] = summary["content"][-1]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept
    disable_nagle_algorithm = True  # or a body waits for the ACK of its headers
    server: WandbServer

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send({})

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        if self.path == "/graphql":
            operation = re.match(r"\s*\w+\s+(\w+)", content["query"])
            given = content.get("variables") or {}
            found = self.server.answer(operation[1] if operation else "", given)
            self._send({"data": found})
        else:
            if self.path.endswith("/file_stream"):
                self.server.take_stream(self.path.split("/")[-2], content.get("files") or {})
            self._send({})

    def _send(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client was killed
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""
