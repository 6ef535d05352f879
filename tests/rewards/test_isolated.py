"""Functions and endpoints in a process of their own: they cannot hang a run or give full scores."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardPart
from rlhf.errors import ConfigError
from rlhf.rewards.answers import Answers
from rlhf.rewards.isolated import FailureError, IsolatedReward
from tests.rewards.endpoint import Endpoint, endpoint

MODULE = """
import os, subprocess, sys, time

def length(prompts, responses, scale=None):
    print("this must not reach the answers")
    return [len(r) * (1 if scale is None else s) for r, s in zip(responses, scale or responses)]

def misbehaves(prompts, responses):
    match responses[0]:
        case "sleep":
            time.sleep(60)
        case "child":
            subprocess.Popen(["sleep", "61"])
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
    return [1.0] * len(responses)

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
        started.append(IsolatedReward("mine", RewardPart(kind=kind, **keys)))
        return started[-1]

    yield started_part
    for part in started:
        part.close()


def answers(*responses: str, **columns: list[Any]) -> Answers:
    count = len(responses)
    return Answers(["?"] * count, responses, [True] * count, [1] * count, columns)


def score(part: IsolatedReward, batch: Answers) -> list[float]:
    part.ask(batch)
    return part.scores()


def test_a_function_gets_prompts_responses_and_columns(start: Start) -> None:
    part = start(function="my_rewards:length", columns=["scale"])
    assert score(part, answers("a", "bcd", scale=[2, 0.5])) == [2, 1.5]
    assert score(part, answers("é" * 70_000, scale=[1])) == [70_000], "more than a pipe holds"


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("sleep", r"it took more than 0\.5 s"),
        ("raise", r"KeyError: 'no such"),
        ("exit", "its process ended"),
        ("text", "could not convert string to float"),
        ("few", "it returned 1 scores for 2 responses"),
        ("none", "TypeError"),
    ],
)
def test_what_misbehaves_fails_and_scores_the_next_batch(
    response: str, reason: str, start: Start
) -> None:
    part = start(function="my_rewards:misbehaves", timeout_seconds=0.5)
    begun = time.monotonic()
    with pytest.raises(FailureError, match=reason) as caught:
        score(part, answers(response, "b"))
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 10
    part.part.timeout_seconds = 30  # for the start of a new process
    assert score(part, answers("a", "b")) == [1, 1]


def test_numbers_that_are_not_finite_are_no_scores(start: Start) -> None:
    found = score(start(function="my_rewards:misbehaves"), answers("nan", "b"))
    assert all(map(math.isnan, found))


def test_nothing_that_a_function_started_outlives_it(start: Start) -> None:
    part = start(function="my_rewards:misbehaves", timeout_seconds=1)
    with pytest.raises(FailureError):
        score(part, answers("child"))
    patience = time.monotonic() + 10  # the kernel ends what was killed a moment later
    while b"sleep\x0061\x00" in commands():
        assert time.monotonic() < patience, "a process of the function goes on"
        time.sleep(0.05)


def commands() -> set[bytes]:
    """The command lines of all processes."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            found.add(path.read_bytes())
    return found


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


def test_errors_of_an_endpoint_are_tried_again(server: Endpoint, start: Start) -> None:
    part = start(RewardKind.http, url=server.url, retries=2)
    server.faults = ["500", "cut"]
    assert score(part, answers("abc")) == [3]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("sleep", "it took more than 0.5 s"),
        ("500", "too many 500 error responses"),
        ("length", "it returned 3 scores for 2 responses"),
        ("cut", "IncompleteRead"),
        ("text", r'not \{"scores"'),
    ],
)
def test_an_endpoint_that_misbehaves_fails(
    fault: str, reason: str, server: Endpoint, start: Start
) -> None:
    part = start(RewardKind.http, url=server.url, retries=0, timeout_seconds=0.5)
    server.faults = [fault]
    with pytest.raises(FailureError, match=reason):
        score(part, answers("a", "b"))


def test_nobody_at_the_address_is_refused_at_the_start(start: Start) -> None:
    with pytest.raises(
        ConfigError, match=r"rewards\.mine\.url=http://127.0.0.1:9/: nothing answers"
    ):
        start(RewardKind.http, url="http://127.0.0.1:9/")
