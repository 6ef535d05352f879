"""Pages in headless Chromium: what they show, what they complain about, and whom they shut out."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

BAD = {"Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"}
# Faults of accessibility, which axe-core finds.
AUDIT = """axe.run().then((found) => found.violations.map((each) =>
    ({rule: each.id, impact: each.impact, where: each.nodes.map((node) => node.html)})))"""


class Shown(NamedTuple):
    """A page after its scripts: the document, complaints, and faults of accessibility."""

    document: str
    complaints: list[dict[str, Any]]
    faults: list[dict[str, Any]]


def show(path: Path, folder: Path, *, width: int = 1400, dark: bool = False) -> Shown:
    """Open a page and audit it; Chromium's profile goes to ``folder``."""
    spec = find_spec("axe_core_python")
    assert spec.origin is not None
    with tab(folder, "about:blank") as page:
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=f"file://{path}")
        page.wait_for(
            f"location.href === {f'file://{path}'!r} && document.readyState === 'complete'"
        )
        page.run((Path(spec.origin).parent / "axe.min.js").read_text())
        faults = page.run(AUDIT)
        return Shown(page.run("document.documentElement.outerHTML"), page.complaints(), faults)


class Tab:
    """A page that a test clicks on: Chromium's DevTools protocol over a pair of pipes."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._session: dict[str, str] = {}
        self._count, self._held = 0, b""
        self._waiting = select.poll()  # select.select refuses descriptors above 1,023
        self._waiting.register(answers, select.POLLIN)
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; events that come meanwhile go to ``events``."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": parameters} | self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                return answer["result"]
            self.events.append(answer)

    def _next(self, seconds: float = 60) -> dict[str, Any]:
        while b"\0" not in self._held:
            assert self._waiting.poll(1000 * seconds), "Chromium does not answer"
            read = os.read(self._answers, 1 << 16)
            assert read, "Chromium has ended"
            self._held += read
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def run(self, script: str) -> Any:
        """Return the value of a script in the page, or of its promise."""
        how = {"returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def complaints(self) -> list[dict[str, Any]]:
        """Return what the page has written to the console, and its errors."""
        return [event for event in self.events if event["method"] in BAD]

    def wait_for(self, script: str, seconds: float = 60) -> None:
        """Wait until a script is true."""
        patience = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < patience, self.run("document.body.innerText")
            time.sleep(0.02)


@contextmanager
def tab(folder: Path, url: str) -> Iterator[Tab]:
    """Open ``url`` in headless Chromium, whose profile goes to ``folder``."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    flags += [f"--user-data-dir={folder / 'profile'}", "--disable-background-networking"]
    flags.append("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    redirected = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null'  # where Chromium expects pipes
    command = ["sh", "-c", redirected, str(CHROMIUM), *flags]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes) as run:  # closing the pipes ends Chromium
        opened = Tab(run.stdin.fileno(), run.stdout.fileno())
        opened.call("Page.navigate", url=url)
        yield opened
