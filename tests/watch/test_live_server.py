"""What the server of the live page sends, and to whom."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import CheckpointError
from rlhf.watch import live_server
from rlhf.watch.__main__ import main
from rlhf.watch.live_server import WatchServer
from tests.watch.watched import (
    RESULT,
    alarm,
    append,
    finish,
    ppo_lines,
    sample,
    sft_lines,
    started_run,
)

EVIL = "</script><img src=http://evil.example/x onerror=alert(1)>"
SCORE = "PPO: Score"


@pytest.fixture(autouse=True)
def every_request_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "LEAST_SECONDS", 0.0)


@contextmanager
def served(folder: Path, *beside: Path) -> Iterator[WatchServer]:
    with WatchServer(folder, 0, beside) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: WatchServer, name: str, *, method: str = "GET", **headers: str
) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    path = name if name.startswith("/") else f"{server.path}/{name}"
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer, answer.read().decode()


def updates(server: WatchServer, since: str = "", run: str = "") -> dict[str, Any]:
    answer, text = ask(server, f"updates?since={since}&run={run}")
    assert answer.status == 200, text
    return json.loads(text)


def test_only_what_is_new_is_sent(tmp_path: Path) -> None:
    folder = started_run(tmp_path / "run")
    append(folder / "metrics.jsonl", ppo_lines(range(1, 301)))
    with served(folder) as server:
        first = updates(server)
        folded = [part for part, text in first["parts"].items() if text.startswith("<details>")]
        assert folded == ["over KL"], "only the first charts are open"
        (line,) = first["charts"][SCORE]["lines"]
        assert (line["from"], line["x"]) == (0, [*range(1, 301)])
        assert first["title"] == "ppo 300 of 40, pets, seed 3"
        assert "300 of 40" in first["parts"]["status"]
        assert SCORE in first["parts"]["PPO"]
        assert first["parts"]["SFT"] == ""

        append(folder / "metrics.jsonl", ppo_lines([301]))
        second = updates(server, first["version"])
        (line,) = second["charts"][SCORE]["lines"]
        assert (line["from"], line["x"], line["y"]) == (300, [301], [3.01])
        assert second["parts"].keys() == {"status"}, "no chart is drawn again"
        assert "3.01" in second["charts"][SCORE]["description"]

        (line,) = updates(server)["charts"][SCORE]["lines"]  # another page
        assert line["x"] == [*range(1, 302)]
        assert updates(server, second["version"])["charts"] == {}

        append(folder / "alarms.jsonl", [alarm(301, EVIL)])
        third = updates(server, second["version"])
        assert "alarm clipping: ppo/clipfrac=0.5 at ppo step 301" in third["parts"]["alarms"]
        assert "#alarm-clipping" in third["parts"]["PPO"], "the chart has a flag"
        assert third["parts"].keys() == {"status", "alarms", "PPO"}


def test_curves_of_finished_runs_are_drawn_beside_those_of_the_run(tmp_path: Path) -> None:
    folder, other = started_run(tmp_path / "run"), started_run(tmp_path / "pets" / "monday")
    append(folder / "metrics.jsonl", ppo_lines(range(1, 5)))
    append(other / "metrics.jsonl", ppo_lines(range(1, 9)))
    with served(folder, other) as server:
        found = updates(server)
    own, beside = found["charts"][SCORE]["lines"]
    assert (own["label"], own["x"]) == ("rollouts", [1, 2, 3, 4])
    assert (beside["label"], beside["x"]) == ("pets/monday", [*range(1, 9)])
    assert found["charts"]["PPO: Response length"]["lines"][0]["label"] == "this run"
    lines = [line for chart in found["charts"].values() for line in chart["lines"]]
    (tone,) = {line["setting"] for line in lines if line["label"] == "pets/monday"}
    keys = re.findall(r'key s(\d)">pets/monday<', "".join(found["parts"].values()))
    assert len(keys) > 1
    assert set(keys) == {str(tone)}, "a run has one colour on the page"


def test_runs_beside_are_runs_and_belong_to_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = started_run(tmp_path / "run")
    assert main([str(folder), "--beside", str(tmp_path)]) == 2
    assert f"{tmp_path}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(folder), "--beside", str(folder), "--terminal"])


def test_answers_stand_beside_those_before_training_and_stay_text(tmp_path: Path) -> None:
    folder = started_run(tmp_path / EVIL.replace("/", "_"))
    append(folder / "samples.jsonl", [sample(0, "a dog"), sample(10, "two"), sample(20, EVIL)])
    averaged = sample(20, "averaged") | {"model": "actor_ema"}
    append(folder / "samples.jsonl", [averaged, sample(20, "new", prompt=EVIL)])
    risen = [sample(step, "r", prompt="Risen?") | {"score": 0.1 * step} for step in (0, 20)]
    append(folder / "samples.jsonl", risen)
    append(folder / "alarms.jsonl", [alarm(1, EVIL)])
    with served(folder) as server:
        parts = updates(server)["parts"]
    assert re.findall(r"step \d+, score 0.50, KL 0.10", parts["answers"]) == [
        "step 0, score 0.50, KL 0.10",
        *2 * ["step 20, score 0.50, KL 0.10"],
    ]
    assert "a dog" in parts["answers"]
    assert re.findall("<h3>(.{5})", parts["answers"])[:2] == ["Risen", "Name "], "by change"
    assert "newest one: by score, 1 higher, 0 lower, 2 the same; the larg" in parts["answers"]
    assert not re.search("averaged|two", parts["answers"])
    for part in parts.values():
        assert "<img" not in part


def test_a_finished_run_and_a_damaged_line_are_shown(tmp_path: Path) -> None:
    folder = started_run(tmp_path / "run")
    append(folder / "metrics.jsonl", sft_lines(range(1, 5)))
    finish(folder)
    with served(folder) as server:
        status = updates(server)["parts"]["status"]
        assert "finished; objective 0.750, of no phase; no reason found to doubt it" in status
        assert " left<" not in status.partition("<table")[0]
        append(folder / "metrics.jsonl", [{"phase": 7, "step": 5}])
        assert "line 5: phase is not a text" in updates(server)["parts"]["status"]


def test_a_sweep_has_a_row_for_each_job_and_a_page_for_each_row(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    running, finished = started_run(sweep / "kl=0.1,lr=<1"), started_run(sweep / "kl=0.2")
    append(running / "metrics.jsonl", ppo_lines([1, 2]))
    append(finished / "metrics.jsonl", ppo_lines([40]))
    finish(finished)
    worse = started_run(sweep / "kl=0.4")
    (worse / "result.json").write_text(json.dumps(RESULT | {"objective": 0.5}))
    started_run(tmp_path / "other")
    with served(sweep) as server:
        found = updates(server)
        status = found["parts"]["status"]
        assert "2 of 3 jobs finished; best so far: kl=0.2</h1>" in status
        assert 'href="?run=kl%3D0.1%2Clr%3D%3C1"' in status
        cells = [re.findall("<td>(.*?)</td>", row) for row in status.split("<tr>")[2:]]
        assert [row[1:] for row in cells] == [
            ["ppo 2 of 40", "score of rollouts 0.020"],
            ["ppo 40 of 40", "objective 0.750"],
            ["", "objective 0.500"],
        ]
        assert [row[0].partition(",")[0] for row in cells] == ["running", "finished", "finished"]

        started_run(sweep / "kl=0.3")
        assert "kl=0.3" in updates(server, found["version"])["parts"]["status"]
        job = updates(server, run="kl%3D0.1%2Clr%3D%3C1")
        assert job["title"] == "ppo 2 of 40, pets, seed 3"
        assert 'href="?"' in job["parts"]["status"], "a way back"
        for wrong in ("..%2Fother", "kl=0.9", "%2Fetc", "."):
            assert ask(server, f"updates?run={wrong}")[0].status == 404

        (sweep / "kl=0.3" / "config.yaml").write_text("a: [")
        assert "cannot be read" in updates(server, run="kl%3D0.3")["parts"]["status"]


def test_the_page_names_no_other_host_and_may_load_nothing_else(tmp_path: Path) -> None:
    with served(started_run(tmp_path / "run")) as server:
        named = r"www\.w3\.org/|github\.com/leeoniya/"  # of SVG, and of uPlot in a comment
        for name, kind in (("", "html"), ("page.css", "css"), ("page.js", "javascript")):
            answer, text = ask(server, name)
            assert answer.status == 200
            assert kind in answer.headers["Content-Type"]
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert not re.search("unsafe|http|[*]", policy)
            assert answer.headers["Set-Cookie"] is None
            assert not re.findall(rf"https?://(?!{named})|@import|url\(", text)
        page = ask(server, "")[1]
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == [
        "data:,",
        f"{server.path}/page.css",
        f"{server.path}/page.js",
    ]


REFUSED: list[tuple[str, int, dict[str, str]]] = [
    ("", 403, {"Host": "evil.example"}),
    ("updates", 403, {"Host": "evil.example:{port}"}),
    ("updates", 403, {"Host": "127.0.0.1.evil.example"}),
    ("updates", 403, {"Origin": "http://evil.example"}),
    ("/", 404, {}),
    ("/wrong-token/updates", 404, {}),
    ("../updates", 404, {}),
    ("config.yaml", 404, {}),
    *(("updates", 501, {"method": each}) for each in ("POST", "PUT", "DELETE", "HEAD")),
]


def test_other_requests_are_refused(tmp_path: Path) -> None:
    with served(started_run(tmp_path / "run")) as server:
        port = str(server.server_address[1])
        for name, status, options in REFUSED:
            given = {key: value.replace("{port}", port) for key, value in options.items()}
            answer, text = ask(server, name, **given)
            assert answer.status == status, (name, options)
            assert "pets" not in text
        assert ask(server, "", Host=f"localhost:{port}")[0].status == 200


def test_what_cannot_be_watched_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = started_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with served(folder) as server:
        port = server.server_address[1]
        for words, said in (
            ([str(tmp_path / "empty")], "empty holds no run: neither it nor a folder in it has"),
            ([str(tmp_path / "missing")], "missing holds no run"),
            ([str(tmp_path / "missing"), "--terminal"], "missing holds no run"),
            ([str(folder), "--port", str(port)], f"--port {port}: "),
        ):
            assert main(words) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("error: ")
            assert said in line
    with pytest.raises(CheckpointError):
        WatchServer(tmp_path / "empty", 0)
