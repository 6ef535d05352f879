"""Pages in headless Chromium: what they show, what they complain about, and whom they shut out."""

import json
import os
import re
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

# Runs axe-core, and leaves what it finds in the page.
AUDIT = """
axe.run().then((found) => {
  const report = document.createElement("pre");
  report.id = "audit";
  report.textContent = JSON.stringify(found.violations.map((each) =>
    ({rule: each.id, impact: each.impact, where: each.nodes.map((node) => node.html)})));
  document.body.append(report);
});
"""


class Shown(NamedTuple):
    """A page after its scripts: the document, console messages, and faults of accessibility."""

    document: str
    console: list[str]
    faults: list[dict[str, Any]]


def show(path: Path, folder: Path, *, width: int = 1400, dark: bool = False) -> Shown:
    """Open a copy of a page that audits itself; Chromium's profile goes to ``folder``."""
    spec = find_spec("axe_core_python")
    assert spec is not None
    assert spec.origin is not None
    axe = (Path(spec.origin).parent / "axe.min.js").read_text()
    copy = folder / "audited.html"
    scripts = f"<script>{axe}</script><script>{AUDIT}</script></body>"
    copy.write_text(path.read_text().replace("</body>", scripts))
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={width},1000", "--virtual-time-budget=20000"]
    if dark:
        command.append("--blink-settings=preferredColorScheme=0")
    run = subprocess.run(
        [*command, f"file://{copy}"], capture_output=True, text=True, timeout=120, check=True
    )
    audit = re.search(r'<pre id="audit">(.*?)</pre>', run.stdout, re.DOTALL)
    assert audit is not None, "the audit did not end"
    unescaped = audit[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    console = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    return Shown(run.stdout, console, json.loads(unescaped))


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
        """Return the value of a script in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

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
        assert run.stdin is not None
        assert run.stdout is not None
        opened = Tab(run.stdin.fileno(), run.stdout.fileno())
        opened.call("Page.navigate", url=url)
        yield opened
