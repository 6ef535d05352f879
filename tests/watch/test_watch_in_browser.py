"""A page that follows a run: charts grow, alarms appear, and the reader stays where he is."""

from __future__ import annotations

import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rlhf.watch.live_server import WatchServer
from tests.browser import needs_chromium, tab
from tests.watch.watched import alarm, append, finish, ppo_lines, sample, started_run

BOX = "document.querySelector('[data-part=PPO] .plot')"
X = f"{BOX}?.chart?.lines[0].x"


@pytest.mark.slow
@needs_chromium
def test_the_page_follows_a_run(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    folder = started_run(sweep / "kl=0.1,seed=1")
    started_run(sweep / "kl=0.2,seed=1")
    append(folder / "metrics.jsonl", ppo_lines(range(1, 7)))
    with WatchServer(sweep, 0) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        with tab(tmp_path, server.address) as page:
            page.wait_for("document.querySelectorAll('tbody tr').length === 2")
            page.run("document.querySelector('a').click()")
            page.wait_for(f"{BOX} != null")
            page.run(f"{BOX}.scrollIntoView()")  # others are drawn when they come into view
            page.wait_for(f"{X}?.length === 6 && {BOX}.querySelector('canvas') != null")
            page.run(f"window.canvas = {BOX}.querySelector('canvas')")
            undrawn = "document.querySelectorAll('details[open] .plot:not(:has(canvas))').length"
            assert page.run(undrawn), "charts below the window wait"
            page.run("dispatchEvent(new Event('beforeprint'))")
            assert page.run(undrawn) == 0, "a print has all charts"
            page.run("document.querySelector('.tiles details').open = true")
            page.run(f"{BOX}.focus()")
            before = page.run("canvas.toDataURL()")

            append(folder / "metrics.jsonl", ppo_lines(range(7, 9)))
            gold = {"phase": "ppo", "step": 8, "ppo/eval_gold": 0.5}
            append(folder / "metrics.jsonl", [gold])  # a new chart beside the one with the focus
            append(folder / "samples.jsonl", [sample(0, "a dog"), sample(8, "<b>a cat</b>")])
            append(folder / "alarms.jsonl", [alarm(8)])
            page.wait_for(f"{X}.length === 8")
            assert page.run("document.querySelector('.tiles details').open"), "stays open"
            assert page.run("document.title") == "ppo 8 of 40, pets, seed 3"
            assert page.run(f"canvas.isConnected && document.activeElement === {BOX}")
            assert page.run("canvas.toDataURL()") != before
            assert page.run("document.querySelector('.doubts li').textContent").startswith("alarm")
            assert page.run("document.querySelector('.flag').hash") == "#alarm-clipping"
            answers = "[...document.querySelectorAll('.answer .text')].map((a) => a.textContent)"
            assert page.run(answers) == ["a dog", "<b>a cat</b>"]

            # a resumed run goes back
            (folder / "metrics.jsonl").write_text("")
            append(folder / "metrics.jsonl", ppo_lines([1, 2]))
            page.wait_for(f"{X}.length === 2")
            finish(folder)
            page.wait_for("document.querySelector('.verdict').textContent.includes('objective')")
            asked = [e for e in page.events if e["method"] == "Network.requestWillBeSent"]
            hosts = {urlsplit(each["params"]["request"]["url"]).netloc for each in asked}
            assert hosts <= {urlsplit(server.address).netloc, ""}
            assert not page.complaints()
        server.shutdown()
