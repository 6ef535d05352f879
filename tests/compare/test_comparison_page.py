"""The page in headless Chromium, from the first click to a reward model, and hostile requests."""

import json
import random
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlhf.compare.__main__ import Comparison, ComparisonServer, main
from rlhf.compare.preference_file import AnsweringModel, PreferenceFile
from rlhf.report.page import HOST
from tests.browser import Tab, needs_chromium, tab
from tests.compare.compared import run_with
from tests.runs import TINY_RUN, launch, start

EVIL = "<img src=http://evil.example/x onerror=\"document.title='evil'\"><b>bold</b>"
BEFORE = [*(f"old answer {i}" for i in range(6)), "the same", "as before"]
AFTER = [EVIL, *(f"new answer {i}" for i in range(1, 6)), "the same", "as before"]
KEYS = {"B is better": "b", "Tie": "T", "Both bad": "n"}  # the other buttons are clicked
PLACE = "Pair {} of 6; at 2 more prompts both models gave the same answer"
TEXTS = "[...document.querySelectorAll('p, pre')].map((each) => each.textContent)"
CLICKS = ["A is better", "B is better", "A is better", "Tie", "Both bad", "Skip"]


def click(page: Tab, label: str) -> None:
    """Click a button or press its key, and wait until the page shows something else."""
    shown = json.dumps(page.run(TEXTS))
    if label in KEYS:
        page.call("Input.dispatchKeyEvent", type="keyDown", key=KEYS[label])
    else:
        page.run(f"document.querySelector('button[value={json.dumps(label)}]').click()")
    is_loaded = "document.readyState === 'complete'"
    page.wait_for(f"{is_loaded} && JSON.stringify({TEXTS}) !== JSON.stringify({shown})")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def served(*words: object, **how: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start the command; yield its address and the process."""
    with start("-m", "rlhf.compare", *words, **how) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.match(r"open (http://127\.0\.0\.1:\d+/\S+) in a browser", said)
            assert found, said
            yield found[1], process
        finally:
            process.kill()


@pytest.mark.slow
@needs_chromium
def test_choices_on_the_page_train_a_reward_model(tmp_path: Path) -> None:
    run_dir = run_with(tmp_path / "smoke" / "run", [f" {text}" for text in BEFORE], AFTER)
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
    assert [(row["chosen"].strip(), row["rejected"].strip()) for row in rows(out)] == chosen
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
    page.wait_for(f"{TEXTS}[0] === {PLACE.format(1)!r}")
    chosen = []
    for number, label in enumerate(CLICKS):
        place, question, a, b = page.run(TEXTS)
        assert place == PLACE.format(number + 1)
        assert question == f"Question {number}?"
        assert {a, b} == {BEFORE[number], AFTER[number]}, "text of a model stays text"
        assert not re.search("PPO|SFT", page.run("document.documentElement.outerHTML"))
        click(page, label)
        chosen += {"A is better": [(a, b)], "B is better": [(b, a)]}.get(label, [])
        assert len(rows(out)) == len(chosen), "written at once"
        assert len(rows(undecided)) == len({"Tie", "Both bad"} & {*CLICKS[: number + 1]})
        if number == 2:
            page.run("document.title = 'before'")
            page.call("Page.reload")
            page.wait_for(f"document.title !== 'before' && {TEXTS}[0] === {PLACE.format(4)!r}")
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
    assert not page.complaints()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ComparisonServer]:
    new, old = (
        AnsweringModel(name, {f"question {i}": f"<b>{name} {i}" for i in range(4)})
        for name in ("new", "old")
    )
    with (
        closing(PreferenceFile(tmp_path / "p.jsonl")) as file,
        ComparisonServer(Comparison((new, old), file, seed=0), 0) as opened,
    ):
        thread = threading.Thread(target=opened.serve_forever, args=[0.01])
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


class Request(NamedTuple):
    """What a browser sends for a click on "A is better", or something like it."""

    path: str
    host: str
    method: str = "POST"
    origin: str | None = "http://127.0.0.1:{port}"
    length: str | None = "{size}"
    body: bytes = b"index=0&verdict=A+is+better"

    def sent_to(self, server: ComparisonServer) -> str:
        """Return the head and body of the answer."""
        port = server.server_address[1]
        named = {"Host": self.host, "Origin": self.origin, "Content-Length": self.length}
        lines = [f"{name}: {value}" for name, value in named.items() if value is not None]
        head = "\r\n".join([f"{self.method} {self.path} HTTP/1.1", *lines, "", ""])
        head = head.replace("{port}", str(port)).replace("{size}", str(len(self.body)))
        with socket.create_connection((HOST, port), timeout=20) as connection:
            with suppress(ConnectionError):  # a refused body is not read
                connection.sendall(head.encode() + self.body)
                connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()


def click_on(server: ComparisonServer) -> Request:
    return Request(server.path, "127.0.0.1:{port}")


def test_a_click_is_kept_once_and_the_last_leads_to_the_result(
    server: ComparisonServer, tmp_path: Path
) -> None:
    click = click_on(server)
    shown = click._replace(method="GET", body=b"").sent_to(server)
    assert shown.startswith("HTTP/1.0 200 OK")
    assert "Pair 1 of 4" in shown
    assert re.search("&lt;b&gt;(new|old) 0", shown), "text stays text"
    for index in (0, 0, 1, 7, 2):  # a second click, and a page that was never shown
        answer = click._replace(body=f"index={index}&verdict=A+is+better".encode()).sent_to(server)
        assert answer.startswith("HTTP/1.0 303 See Other")
        assert f"Location: {server.path}\r\n" in answer
    assert len(rows(tmp_path / "p.jsonl")) == 3
    click._replace(body=b"index=3&verdict=Skip", host="localhost:1", origin=None).sent_to(server)
    assert len(rows(tmp_path / "p.jsonl")) == 3
    assert "of 3 comparisons" in click._replace(method="GET", body=b"").sent_to(server)


def test_a_choice_that_cannot_be_written_is_no_choice(
    server: ComparisonServer, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").mkdir()
    answer = click_on(server).sent_to(server)
    assert answer.startswith("HTTP/1.0 500")
    assert "cannot be written (Is a directory): choose another file" in answer
    (tmp_path / "p.jsonl").rmdir()
    click_on(server).sent_to(server)
    assert len(rows(tmp_path / "p.jsonl")) == 1


HOSTS = ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "", "[::1]:{port}"]
ORIGINS = ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1", ""]
PATHS = ["/", "/config", "/gradio_api/upload", "/gradio_api/run/predict", "/../../etc/passwd", "//"]
PATHS += ["{path}/", "{path}?x=1", "http://127.0.0.1:{port}{path}", "/\x00", f"/{'a' * 70_000}"]
METHODS = ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "HEAD", "\x1b[31m", "POST POST"]
LENGTHS = [None, "-1", "1e3", "9" * 5000, "1000", "200000000", " ", "+5", "0x10"]
BODIES = [
    b"",
    b"index=null&verdict=Tie",
    b"index=&verdict=Tie",
    b"index=0&verdict=x",
    b"verdict=Tie",
]
BODIES += [b'{"data": [0]}', b"index=1e999&verdict=Tie", b"index=-1&verdict=Tie", b"\xff" * 900]
BODIES += [b"&" * 900, b"index=0;verdict=Tie", b"x" * 100_000]


@pytest.mark.parametrize("number", range(12))
def test_hostile_requests_are_refused(
    number: int, server: ComparisonServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(number)
    choices: dict[str, Sequence[Any]] = {"host": HOSTS, "origin": ORIGINS, "path": PATHS}
    choices |= {"method": METHODS, "length": LENGTHS, "body": BODIES}
    wrong = draw.sample(sorted(choices), draw.choice([1, 1, 2]))
    request = click_on(server)._replace(**{name: draw.choice(choices[name]) for name in wrong})
    if "host" in wrong and "origin" not in wrong:  # a name of another site that leads here
        request = request._replace(origin=draw.choice([None, f"http://{request.host}"]))
    request = request._replace(path=request.path.replace("{path}", server.path))
    answer = request.sent_to(server)
    status = re.match(r"HTTP/1\.0 ([45]\d\d) ", answer)
    assert status is not None or answer.startswith("<!DOCTYPE"), (request, answer[:200])
    assert "access-control" not in answer.lower()
    assert not re.search("question|new|old|p.jsonl", answer)
    assert list(tmp_path.iterdir()) == []
    assert "Pair 1 of 4" in click_on(server)._replace(method="GET", body=b"").sent_to(server)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("port", [99_999, 0])
def test_a_port_that_cannot_be_had_is_one_line(
    port: int, server: ComparisonServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = port or server.server_address[1]
    run_dir = run_with(tmp_path / "run", ["old"], ["new"])
    assert main([str(run_dir), "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --port {port}: ")
    assert line.endswith("; choose another")
