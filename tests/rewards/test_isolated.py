"""Functions and endpoints in a process of their own: they cannot hang a run or give full scores."""

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import ConfigError
from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.rewards.isolated import FailureError, IsolatedReward, start_reward_processes
from rlhf.rewards.rules import Answers
from tests.rewards.endpoint import Endpoint, endpoint

MODULE = """
import itertools, os, sys, time

def length(prompts, responses, scale=None):
    print("this must not reach the answers")
    return [len(r) * (1 if scale is None else s) for r, s in zip(responses, scale or responses)]

def misbehaves(prompts, responses):
    match responses[0]:
        case "sleep":
            time.sleep(60)
        case "raise":
            raise KeyError("no such\\nthing")
        case "exit":
            os._exit(3)
        case "text":
            return ["high"]
        case "nan":
            return [float("nan"), float("inf")]
        case "few":
            return [1.0]
        case "none":
            return None
        case "leave":
            sys.exit("bye")
        case "digits":
            return ["1", "2"]
        case "one text":
            return "12"
        case "map":
            return {1: "a", 2: "b"}
        case "bytes":
            return b"ab"
        case "set":
            return {1.0, 2.0}
        case "endless":
            return itertools.repeat(1.0)
        case "closes":
            os.closerange(3, 99)
        case "huge":
            return [1e308, -1e308]
    return [1.0] * len(responses)

def who(prompts, responses):
    return [0.0] * len(responses)

with open("pids", "a") as file:
    file.write(f"{os.getpid()} ")

def needs_more(prompts, responses, other):
    return [0.0] * len(responses)
"""

Start = Callable[..., IsolatedReward]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a part; functions lie in a module of the working directory."""
    (tmp_path / "my_rewards.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    started: list[IsolatedReward] = []

    def started_part(kind: RewardKind = RewardKind.function, **keys: Any) -> IsolatedReward:
        started.append(IsolatedReward("mine", RewardTerm(kind=kind, **keys)))
        return started[-1]

    yield started_part
    for part in started:
        part.close()


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IsolatedReward]:
    """A part that its tests share: after each failure it scores the next batch."""
    folder = tmp_path_factory.mktemp("misbehaving")
    (folder / "my_rewards.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patch.chdir(folder)
        term = RewardTerm(kind=RewardKind.function, function="my_rewards:misbehaves")
        part = IsolatedReward("mine", term)
        yield part
        part.close()


@pytest.fixture(scope="module")
def faulty() -> Iterator[tuple[IsolatedReward, Endpoint]]:
    """A part that its tests share, and its endpoint."""
    with endpoint() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        part = IsolatedReward("mine", RewardTerm(kind=RewardKind.http, url=server.url, retries=0))
        yield part, server
        part.close()


def answers(*responses: str, **columns: list[Any]) -> Answers:
    count = len(responses)
    return Answers(["?"] * count, responses, [True] * count, [1] * count, columns)


def score(part: IsolatedReward, batch: Answers) -> list[float]:
    part.send_answers(batch)
    return [*part.receive_scores().scores]


def test_a_function_gets_prompts_responses_and_columns(start: Start) -> None:
    part = start(function="my_rewards:length", columns=["scale"])
    assert score(part, answers("a", "bcd", scale=[2, 0.5])) == [2, 1.5]
    assert score(part, answers("é" * 70_000, scale=[1])) == [70_000], "more than a pipe holds"


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("sleep", r"it took more than 0\.5 s"),
        ("raise", r"KeyError: 'no such.*my_rewards\.py:13\)"),
        ("leave", r"SystemExit: bye \(.*my_rewards\.py:25\)"),
        ("exit", "its process ended"),
        ("text", "it returned the text 'high' as score 0"),
        ("digits", "it returned the text '1' as score 0"),
        ("one text", "it returned a str: must be a list of numbers"),
        ("map", "it returned a dict"),
        ("bytes", "it returned a bytes"),
        ("set", "it returned a set"),
        ("endless", "it returned 3 scores for 2 responses"),
        ("closes", "its process ended"),
        ("few", "it returned 1 scores for 2 responses"),
        ("none", "TypeError"),
    ],
)
def test_what_misbehaves_fails_and_scores_the_next_batch(
    response: str, reason: str, misbehaving: IsolatedReward
) -> None:
    misbehaving.part.timeout_seconds = 0.5 if response == "sleep" else 30
    begun = time.monotonic()
    with pytest.raises(FailureError, match=reason) as caught:
        score(misbehaving, answers(response, "b"))
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 10
    misbehaving.part.timeout_seconds = 30  # for the start of a new process
    assert score(misbehaving, answers("a", "b")) == [1, 1]


def test_numbers_that_are_not_finite_are_no_scores(misbehaving: IsolatedReward) -> None:
    for response in ("nan", "huge"):
        assert all(map(math.isnan, score(misbehaving, answers(response, "b")))), response


@pytest.mark.parametrize(
    ("function", "columns", "reason"),
    [
        ("nowhere:f", [], "ModuleNotFoundError"),
        ("my_rewards:nothing", [], "AttributeError"),
        ("my_rewards:needs_more", [], "missing a required argument: 'other'"),
        ("my_rewards:misbehaves", ["x"], "unexpected keyword argument 'x'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_the_start(
    function: str, columns: list[str], reason: str, start: Start
) -> None:
    with pytest.raises(ConfigError, match=rf"rewards\.mine\.function={function}: .*{reason}"):
        start(function=function, columns=columns)


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with endpoint() as running:
        yield running


def test_an_endpoint_gets_batches_with_columns(server: Endpoint, start: Start) -> None:
    part = start(RewardKind.http, url=server.url, batch_size=2, columns=["n"])
    assert score(part, answers("a", "bc", "d", n=[1, 2, 3])) == [1, 2, 1]
    assert [each["columns"] for each in server.requests] == [{"n": [1, 2]}, {"n": [3]}]


def test_an_endpoint_gets_its_token_from_the_environment(
    server: Endpoint, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORER_TOKEN", "a b c")
    part = start(RewardKind.http, url=server.url, token_variable="SCORER_TOKEN")
    assert score(part, answers("a")) == [1]
    assert server.tokens == ["Bearer a b c"]
    with pytest.raises(ConfigError, match="token_variable=NOTHING: this variable is not set"):
        start(RewardKind.http, url=server.url, token_variable="NOTHING")
    monkeypatch.setenv("SCORER_TOKEN", "a\nb")
    with pytest.raises(ConfigError, match="token_variable=SCORER_TOKEN: its value must be plain"):
        start(RewardKind.http, url=server.url, token_variable="SCORER_TOKEN")


def test_errors_of_an_endpoint_are_tried_again(server: Endpoint, start: Start) -> None:
    part = start(RewardKind.http, url=server.url, retries=2)
    server.faults = ["500", "cut"]
    assert score(part, answers("abc")) == [3]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("sleep", "it took more than 0.5 s"),
        ("500", "HTTP status 500"),
        ("length", "it returned 3 scores for 2 responses"),
        ("cut", "IncompleteRead"),
        ("text", r'not \{"scores"'),
        ("texts", 'score 0 of the answer: "1.0" is not a number'),
        ("true", "score 0 of the answer: true is not a number"),
        ("away", "HTTP status 302"),
        ("endless", "its answer has more than 16384 KiB"),
    ],
)
def test_an_endpoint_that_misbehaves_fails(
    fault: str, reason: str, faulty: tuple[IsolatedReward, Endpoint]
) -> None:
    part, server = faulty
    part.part.timeout_seconds = 0.5 if fault == "sleep" else 30
    server.faults = [fault]
    with pytest.raises(FailureError, match=reason):
        score(part, answers("a", "b"))
    part.part.timeout_seconds = 30
    assert score(part, answers("a", "b")) == [1, 1]


def test_a_number_beyond_every_float_is_no_score(
    faulty: tuple[IsolatedReward, Endpoint],
) -> None:
    part, server = faulty
    server.faults = ["huge"]
    assert all(map(math.isnan, score(part, answers("a", "b"))))


def test_an_endpoint_that_hangs_and_is_then_gone_fails_each_batch(start: Start) -> None:
    """The process and its request have one limit: on a busy machine either may come first."""
    with endpoint() as server:
        server.faults = ["sleep"]
        part = start(RewardKind.http, url=server.url, timeout_seconds=0.5)
        with pytest.raises(FailureError, match=r"it took more than|no answer within"):
            score(part, answers("a"))
    for _ in range(2):
        with pytest.raises(FailureError, match=r"nothing answers there|refused"):
            score(part, answers("a"))


@pytest.mark.parametrize("place", ["127.0.0.1:9", "a..b", "[::1", "-", "a" * 70])
def test_a_host_that_does_not_answer_is_refused_at_the_start(
    place: str, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.mine\.url=.*: nothing answers there"):
        start(RewardKind.http, url=f"http://{place}/score")
    assert "Traceback" not in capfd.readouterr().err


def test_a_part_whose_run_ends_while_it_starts_is_silent(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        words = ["-P", "-m", "rlhf.base.supervisor", "rlhf.rewards.isolated:serve_scores"]
        words += [str(theirs.fileno()), str(os.getpid())]
        part = subprocess.Popen([sys.executable, *words], pass_fds=[theirs.fileno()])
    request = {"part": asdict(RewardTerm(kind=RewardKind.stop)), "run_dir": None}
    ours.sendall(json.dumps(request).encode() + b"\n")
    ours.close()
    assert part.wait(20) == 0
    assert capfd.readouterr().err == ""


def test_parts_that_started_end_if_another_cannot(start: Start, tmp_path: Path) -> None:
    mine = RewardTerm(kind=RewardKind.function, function="my_rewards:who")
    other = RewardTerm(kind=RewardKind.function, function="my_rewards:nothing")
    with pytest.raises(ConfigError, match=r"rewards\.other\.function"):
        start_reward_processes({"mine": mine, "other": other})
    pids = (tmp_path / "pids").read_text().split()
    assert not [pid for pid in pids if Path("/proc", pid).exists()]
