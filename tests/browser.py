"""Pages in headless Chromium: what they show, what they complain about, and whom they shut out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
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
