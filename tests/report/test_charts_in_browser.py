"""What a reader does with a chart: point, drag, use the keyboard, read the table, pick one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf.report.comparison import group_by_setting
from rlhf.report.sweep_page import write_sweep_report
from tests.browser import Tab, needs_chromium, tab
from tests.report.test_sweep_page import runs

# The second setting on the page has the second lowest KL: its place in the chart is 1.
FIGURE = "document.querySelector('figure')"
SAID = f"{FIGURE}.querySelector('output').textContent"
PICTURE = f"{FIGURE}.querySelector('canvas').toDataURL()"
FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def settled(page: Tab) -> None:
    page.call("Runtime.evaluate", expression=FRAMES, awaitPromise=True)


def press(page: Tab, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key)
    settled(page)


def mouse(page: Tab, kind: str, x: float, y: float) -> None:
    page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    settled(page)


@pytest.mark.slow
@needs_chromium
def test_charts_are_read_with_mouse_and_keyboard(tmp_path: Path) -> None:
    path = write_sweep_report(tmp_path, group_by_setting(runs()))
    with tab(tmp_path, f"file://{path}") as page:
        page.wait_for(f"{FIGURE}?.querySelector('canvas') != null")
        settled(page)
        whole = page.run(PICTURE)

        # the keyboard: KL is 0.5, 1.7 and 1.94 nats, all as exact as their three seeds
        page.run(f"{FIGURE}.querySelector('.plot').focus()")
        press(page, "ArrowRight")
        assert page.run(SAID).startswith("3: ppo.kl_ctl=0.5, KL to the reference, nats 0.500 ±")
        press(page, "ArrowRight")
        assert page.run(SAID).startswith("1: ppo.kl_ctl=0.1, KL to the reference, nats 1.700 ±")
        assert re.search(r"settings 0\.90\d+ ± 0\.0", page.run(SAID))
        press(page, "End")
        assert page.run(SAID).startswith("2: ppo.kl_ctl=0.02, KL to the reference, nats 1.940 ±")
        press(page, "+")
        assert page.run(PICTURE) != whole
        press(page, "Escape")
        assert page.run(PICTURE) == whole

        # the mouse: values under the pointer; dragging zooms, and a double click shows all again
        box = f"{FIGURE}.querySelector('.u-over').getBoundingClientRect()"
        left, width, top = (page.run(f"{box}.{name}") for name in ("left", "width", "top"))
        mouse(page, "mouseMoved", left + 0.05 * width, top + 50)
        assert page.run(SAID).startswith("3: ppo.kl_ctl=0.5")
        mouse(page, "mousePressed", left + 0.5 * width, top + 50)
        mouse(page, "mouseMoved", left + 0.9 * width, top + 50)
        mouse(page, "mouseReleased", left + 0.9 * width, top + 50)
        assert page.run(PICTURE) != whole
        press(page, "Escape")
        assert page.run(PICTURE) == whole

        # the table
        page.run(f"{FIGURE}.querySelector('details').open = true")
        settled(page)
        cells = "[...document.querySelectorAll('figure tbody tr')].map((row) => row.innerText)"
        assert [row[:17] for row in page.run(cells)] == [
            "3: ppo.kl_ctl=0.5",
            "1: ppo.kl_ctl=0.1",
            "2: ppo.kl_ctl=0.0",
        ]

        # a picked setting has a ring
        page.run("document.querySelector('button[data-pick]').click()")
        settled(page)
        assert page.run(PICTURE) != whole
        page.run("document.querySelector('button[data-pick]').click()")
        settled(page)
        assert page.run(PICTURE) == whole
        failed = [e for e in page.events if e["method"] == "Runtime.exceptionThrown"]
        assert not failed
