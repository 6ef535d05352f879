"""The page in headless Chromium, from the first click to a reward model trained on the choices."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Tab, needs_chromium, tab
from tests.compare.compared import run_with
from tests.runs import TINY_RUN, launch, start

EVIL = "<img src=http://evil.example/x onerror=\"document.title='evil'\"><b>bold</b>"
BEFORE = [f"old answer {i}" for i in range(6)]
AFTER = [EVIL, *(f"new answer {i}" for i in range(1, 6))]
TEXTS = "[...document.querySelectorAll('textarea')].map((each) => each.value)"
CLICKS = ["A is better", "B is better", "A is better", "Tie", "Both bad", "Skip"]


def click(page: Tab, label: str) -> None:
    """Click a button, and wait until the page shows something else."""
    shown = json.dumps(page.run(TEXTS))
    buttons = "[...document.querySelectorAll('button')]"
    page.run(f"{buttons}.find((each) => each.textContent.trim() === {label!r}).click()")
    page.wait_for(f"JSON.stringify({TEXTS}) !== JSON.stringify({shown})")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def served(*words: object, **how: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start the command; yield its address and the process."""
    with start("-m", "rlhf.compare", *words, **how) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.match(r"open (http://127\.0\.0\.1:\d+/) in a browser", said)
            assert found, said
            yield found[1], process
        finally:
            process.kill()


@pytest.mark.slow
@needs_chromium
def test_choices_on_the_page_train_a_reward_model(tmp_path: Path) -> None:
    run_dir = run_with(tmp_path / "smoke" / "run", BEFORE, AFTER)
    out, undecided = tmp_path / "p.jsonl", tmp_path / "p.undecided.jsonl"
    with socket.create_server(("127.0.0.1", 0)) as proxy:  # requests to other machines come here
        elsewhere = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        proxies = {"http_proxy": elsewhere, "https_proxy": elsewhere, "no_proxy": "127.0.0.1"}
        with served(run_dir, "--out", out, cwd=tmp_path, **proxies) as (address, process):
            with tab(tmp_path, address) as page:
                chosen = judge(page, out, undecided)
                check_that_nothing_is_loaded_from_elsewhere(page, address)
            process.send_signal(signal.SIGINT)
            said, complaint = process.communicate(timeout=60)
            assert (process.returncode, complaint) == (0, "")
            assert "of 5 comparisons (95 % interval" in said.replace("\n", " ")
        assert asked_of(proxy) == []
    assert [(row["chosen"], row["rejected"]) for row in rows(out)] == chosen
    assert [row["verdict"] for row in rows(undecided)] == ["tie", "both_bad"]
    few = ["data.split=[0,1,0]", "reward.batch_size=1", "reward.epochs=1", "reward.warmup_steps=0"]
    data = ["phase=reward", "data=local", f"data.path={out}"]
    sizes = [word for word in TINY_RUN if not word.startswith(("data.", "reward."))]
    trained = launch(*sizes, *data, *few, f"run_dir={tmp_path / 'trained'}", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "preference, 3 examples, 0 skipped" in trained.stdout
    assert (tmp_path / "trained" / "reward" / "model" / "model.safetensors").exists()


def asked_of(proxy: socket.socket) -> list[bytes]:
    """Return the requests that wait at a proxy which answers none."""
    proxy.setblocking(False)
    found = []
    with suppress(BlockingIOError):
        while True:
            with proxy.accept()[0] as connection:
                found.append(connection.recv(1 << 12))
    return found


def judge(page: Tab, out: Path, undecided: Path) -> list[tuple[str, str]]:
    """Click through all pairs; return the chosen and rejected texts as the page showed them."""
    page.wait_for(f"{TEXTS}[0] === '1 of 6'")
    chosen = []
    for number, label in enumerate(CLICKS):
        place, question, a, b = page.run(TEXTS)
        assert place == f"{number + 1} of 6"
        assert question == f"Human: Question {number}?\n\nAssistant:"
        assert {a, b} == {BEFORE[number], AFTER[number]}, "text of a model stays text"
        assert not re.search("PPO|SFT", page.run("document.documentElement.outerHTML"))
        click(page, label)
        chosen += {"A is better": [(a, b)], "B is better": [(b, a)]}.get(label, [])
        assert len(rows(out)) == len(chosen), "written at once"
        assert len(rows(undecided)) == len({"Tie", "Both bad"} & {*CLICKS[: number + 1]})
        if number == 2:
            page.run("document.title = 'before'")
            page.call("Page.reload")
            page.wait_for(f"document.title !== 'before' && {TEXTS}[0] === '4 of 6'")
    (result,) = page.run(TEXTS)
    wins = sum(good in AFTER for good, _ in chosen)
    share = (wins + 1) / 5
    said = f"smoke/run, PPO step 8 was preferred to smoke/run, SFT in {share:.0%} of 5 comparisons"
    assert result.startswith(said)
    assert page.run("document.title") == "Compare answers"
    return chosen


def check_that_nothing_is_loaded_from_elsewhere(page: Tab, address: str) -> None:
    """Check all requests of the page, and that it had nothing to complain about."""
    asked = [e["params"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
    urls = {each["request"]["url"] for each in asked}
    assert address in urls
    assert not [url for url in urls if not url.startswith((address, "data:", "blob:"))]
    methods = {"Log.entryAdded", "Runtime.exceptionThrown"}
    assert not [event for event in page.events if event["method"] in methods]
