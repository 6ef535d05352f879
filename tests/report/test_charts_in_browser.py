"""What a reader does with a chart: point, drag, use the keyboard, read the table, pick one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf.report.charts import Line, line_chart
from rlhf.report.compare_runs import write_sweep_report
from rlhf.report.comparison import group_runs_by_setting
from rlhf.report.page import Headline, build_jinja_environment
from tests.browser import Tab, needs_chromium, tab
from tests.report.test_sweep_page import runs

# The second setting on the page has the second lowest KL: its place in the chart is 1.
FIGURE = "document.querySelector('figure')"
SAID = f"{FIGURE}.querySelector('output').textContent"
PICTURE = f"{FIGURE}.querySelector('canvas').toDataURL()"
FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def settled(page: Tab) -> None:
    page.run(FRAMES)


def press(page: Tab, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key)
    settled(page)


def mouse(page: Tab, kind: str, share: float) -> None:
    """Move, press or release the mouse at a share of the first chart's width."""
    box = page.run(f"{FIGURE}.querySelector('.u-over').getBoundingClientRect().toJSON()")
    place = {"x": box["left"] + share * box["width"], "y": box["top"] + 50}
    page.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)
    settled(page)


@pytest.mark.slow
@needs_chromium
def test_charts_are_read_with_mouse_and_keyboard(tmp_path: Path) -> None:
    path = write_sweep_report(tmp_path, group_runs_by_setting(runs()))
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
        mouse(page, "mouseMoved", 0.05)
        assert page.run(SAID).startswith("3: ppo.kl_ctl=0.5")
        mouse(page, "mousePressed", 0.5)
        mouse(page, "mouseMoved", 0.9)
        mouse(page, "mouseReleased", 0.9)
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
        assert not page.complaints()


PAGE = """{% extends "page.html" %}{% from "parts.html" import charts, keys, toolbar %}
{% block main %}{{ toolbar() }}{{ keys() }}{{ charts(shown) }}{% endblock %}"""
SAYS = "[...document.querySelectorAll('output')].map((each) => each.textContent)"
PICTURES = "[...document.querySelectorAll('canvas')].map((each) => each.toDataURL())"


GROW = """{
  const box = document.querySelector('.plot'), data = JSON.parse(box.dataset.chart);
  data.lines[0].x.push(90);
  data.lines[0].y.push(7);
  box.dispatchEvent(new CustomEvent("chart", {bubbles: true, detail: data}));
}"""


def changed(now: list[str], then: list[str]) -> list[bool]:
    return [a != b for a, b in zip(now, then, strict=True)]


def page_of_charts(folder: Path) -> Path:
    """Write a page with three charts; the first two have the same x axis."""
    noisy = [(step, 0.5 + 0.1 * (step % 2)) for step in range(1, 31)]
    shown = [
        line_chart("a", [Line("noisy", noisy)], x_label="step", healthy=(2.0, 3.0)),
        line_chart("b", [Line("few", [(0, 1.0), (15, 10.0), (30, 100.0)])], x_label="step"),
        line_chart("c", [Line("other", [(0, -1.0), (1, 1.0), (2, 0.0)])], x_label="share"),
    ]
    page = build_jinja_environment().from_string(PAGE)
    texts = {"title": "t", "verdict": Headline("v", is_doubtful=False), "subtitle": "p"}
    path = folder / "page.html"
    path.write_text(page.render(shown=shown, scripts=[], **texts))
    return path


@pytest.mark.slow
@needs_chromium
def test_charts_with_the_same_axis_move_together(tmp_path: Path) -> None:
    with tab(tmp_path, f"file://{page_of_charts(tmp_path)}") as page:
        page.wait_for("document.querySelectorAll('canvas').length === 3")
        settled(page)
        whole = page.run(PICTURES)
        outside = "document.querySelector('.healthy').classList.contains('outside')"
        assert page.run(outside), "the chart does not reach the healthy range"

        # the pointer in the first chart: the second has the same step, or its nearest
        mouse(page, "mouseMoved", 0.5)
        assert page.run(SAYS) == ["step 15: noisy 0.6", "step 15: few 10", ""]
        # the keyboard moves both too, and zooms both until Escape
        page.run(f"{FIGURE}.querySelector('.plot').focus()")
        press(page, "End")
        assert page.run(SAYS)[:2] == ["step 30: noisy 0.5", "step 30: few 100"]
        press(page, "+")
        assert changed(page.run(PICTURES), whole) == [True, True, False]
        page.run("document.getElementById('whole').click()")
        settled(page)
        assert page.run(PICTURES) == whole

        # a page that follows a run sends the chart's data: the zoom and the canvas stay
        page.run("window.kept = document.querySelector('canvas')")
        press(page, "+")
        before = page.run(PICTURES)
        page.run(GROW)
        settled(page)
        assert page.run("kept.isConnected")
        assert changed(page.run(PICTURES), before) == [True, False, False]
        press(page, "Escape")
        press(page, "End")
        assert page.run(SAYS)[:2] == ["step 90: noisy 7", "step 30: few 100"]

        whole = page.run(PICTURES)

        # smoothing needs many points; a logarithmic axis needs values above 0
        smooth = "smoothing.value = '{}'; smoothing.dispatchEvent(new Event('input'))"
        page.run(smooth.format(0.9))
        settled(page)
        assert changed(page.run(PICTURES), whole) == [True, False, False]
        page.run(smooth.format(0) + "; document.getElementById('log').click()")
        settled(page)
        assert changed(page.run(PICTURES), whole) == [True, True, False]
        assert not page.complaints()


@pytest.mark.soak
@needs_chromium
def test_a_dark_page_is_printed_light_and_without_controls(tmp_path: Path) -> None:
    is_hidden = "getComputedStyle(document.querySelector('.tools')).display === 'none'"
    with tab(tmp_path, f"file://{page_of_charts(tmp_path)}") as page:
        page.wait_for("document.querySelectorAll('canvas').length === 3")
        settled(page)
        seen = {}
        for media, scheme in (("screen", "light"), ("screen", "dark"), ("print", "dark")):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            page.call("Emulation.setEmulatedMedia", media=media, features=[feature])
            settled(page)
            colour = page.run("getComputedStyle(document.body).getPropertyValue('--s0')")
            seen[media, scheme] = (page.run(PICTURES), colour, page.run(is_hidden))
        light, dark, printed = seen.values()
        assert printed[1] == light[1] != dark[1]
        assert printed[0] != dark[0], "the canvas is drawn again"
        assert [light[2], dark[2], printed[2]] == [False, False, True]
