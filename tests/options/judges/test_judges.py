"""Judges: votes, comparisons, stored answers and failures; bad_commands.txt has wrong keys."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import ConfigError, RewardError
from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.options.judges.answer_store import AnswerStore, JudgeReply
from rlhf.options.judges.rewards import Judge
from rlhf.options.judges.rubric import read_rubric
from rlhf.rewards.isolated import FailureError, IsolatedReward
from rlhf.rewards.rules import Answers, PartScores
from tests.options.judges.judge_server import JudgeServer, judge_server, write_rubric

BEST, WORST = '{"clear": 5, "short": 0}', '{"clear": 1, "short": 10}'
Ask = Callable[[Mapping[str, Any], float], str]
Build = Callable[..., Judge]


def answers(*responses: str, **columns: Sequence[Any]) -> Answers:
    count = len(responses)
    return Answers(["?"] * count, responses, [True] * count, [1] * count, columns)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Build a judge whose model is a function; all judges of a test share a file."""

    def build_judge(ask: Ask, **keys: Any) -> Judge:
        rubric = read_rubric(write_rubric(tmp_path))
        part = RewardTerm(kind=RewardKind.judge, rubric="", model="m", url="http://h", **keys)
        judge = Judge(part, rubric, AnswerStore(tmp_path / "verdicts.jsonl"))
        judge.ask = ask
        return judge

    return build_judge


def test_votes_are_averaged_and_each_has_a_seed(build: Build) -> None:
    asked: list[Mapping[str, Any]] = []

    def ask(body: Mapping[str, Any], _: float) -> str:
        asked.append(body)
        return json.dumps({"clear": [1, 3, 5, 5][body["seed"]], "short": 5})

    judge = build(ask, votes=4, temperature=0.7)
    found = judge.score_answers(answers("a"))
    assert found == PartScores([0.75 * 0.625 + 0.25 * 0.5], {"clear": [0.625], "short": [0.5]})
    assert sorted(body["seed"] for body in asked) == [0, 1, 2, 3]
    assert {(body["model"], body["temperature"]) for body in asked} == {("m", 0.7)}


@pytest.mark.parametrize(("failing", "fails"), [(1, False), (2, True), (4, True)])
def test_more_than_half_of_the_votes_must_be_valid(
    failing: int, build: Build, *, fails: bool
) -> None:
    judge = build(lambda body, _: "?" if body["seed"] < failing else BEST, votes=4, temperature=1)
    found = judge.score_answers(answers("a", "b"))
    assert [math.isnan(score) for score in found.scores] == [fails, fails]
    assert fails or found.scores == [1, 1], "a failed vote is left out: it is no zero"
    assert found.problem.startswith("the judge answered '?'") is fails


@pytest.mark.parametrize(
    ("prefer", "score"),
    [
        (lambda a, b: "A", 0.5),
        (lambda a, b: "B", 0.5),
        (lambda a, b: "tie", 0.5),
        (lambda a, b: "A" if a == "mine" else "B", 1),
        (lambda a, b: "A" if a == "theirs" else "B", 0),
        (lambda a, b: "A" if a == "mine" else "tie", 0.75),
    ],
)
def test_a_comparison_in_both_orders_cancels_a_preference_for_a_position(
    prefer: Callable[[str, str], str], score: float, build: Build
) -> None:
    def ask(body: Mapping[str, Any], _: float) -> str:
        text = body["messages"][1]["content"]
        first, second = (text.split(f"<response_{x}>\n")[1].split("\n<")[0] for x in "AB")
        return json.dumps(dict.fromkeys(("clear", "short"), prefer(first, second)))

    judge = build(ask, columns=["chosen"])
    assert judge.score_answers(answers("mine", chosen=["theirs"])).scores == [score]


def test_an_invalid_answer_is_returned_once_with_its_fault(build: Build) -> None:
    asked: list[Mapping[str, Any]] = []

    def ask(body: Mapping[str, Any], _: float) -> str:
        asked.append(body)
        return BEST if len(asked) == 2 else "hm"

    judge = build(ask)
    assert judge.score_answers(answers("a")).scores == [1]
    first, second = (body["messages"] for body in asked)
    assert second[: len(first)] == first
    assert [each["role"] for each in second[len(first) :]] == ["assistant", "user"]
    assert second[-2]["content"] == "hm"
    assert "Invalid JSON" in second[-1]["content"]
    assert math.isnan(judge.score_answers(answers("b")).scores[0])
    assert len(asked) == 4, "one more attempt, not two"


def never(*_: object) -> str:
    raise AssertionError("an answer is stored")


def fails(*_: object) -> str:
    raise RewardError("HTTP status 503")


def test_a_stored_answer_is_never_asked_again(build: Build) -> None:
    numbers = iter(range(1, 9))
    first = build(lambda *_: json.dumps({"clear": next(numbers) % 5 + 1, "short": 0}))
    batch = answers("a", "b", "a")
    found = first.score_answers(batch)
    assert next(numbers) == 3, "equal responses of a batch are one request"
    assert build(never).score_answers(batch) == found, "in another process, such as a replay's"


@pytest.mark.parametrize(
    "changed",
    [{"model": "other"}, {"temperature": 0.5}, {"votes": 2}, {"columns": ["x"]}, {"rubric": ""}],
)
def test_an_answer_is_of_its_model_rubric_and_settings_only(
    changed: dict[str, Any], build: Build, tmp_path: Path
) -> None:
    build(lambda *_: BEST).score_answers(answers("a", x=["b"])._replace(columns={}))
    asked: list[Mapping[str, Any]] = []

    def ask(body: Mapping[str, Any], _: float) -> str:
        asked.append(body)
        return '{"clear": "A", "short": "A"}' if "columns" in changed else WORST

    judge = build(ask)
    for key, value in changed.items():
        setattr(judge.part, key, value)
    if "rubric" in changed:
        text = (tmp_path / "rubric.yaml").read_text().replace("Is it short?", "Is it brief?")
        judge.rubric = read_rubric(write_rubric(tmp_path, text))
    judge.score_answers(answers("a", **({"x": ["b"]} if "columns" in changed else {})))
    assert asked


@pytest.mark.parametrize("fallback", [None, -1.0])
def test_a_failure_is_stored_only_if_the_run_continues_with_its_fallback(
    fallback: float | None, build: Build
) -> None:
    found = build(fails, fallback=fallback).score_answers(answers("a"))
    assert found.problem == "HTTP status 503"
    assert math.isnan(found.scores[0])
    again = build(lambda *_: BEST, fallback=fallback).score_answers(answers("a"))
    assert (again.scores == [1]) is (fallback is None)
    assert (again.problem == found.problem) is (fallback is not None)


def test_ranks_agree_on_the_first_answer_and_survive_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    one, other = AnswerStore(path), AnswerStore(path)
    one.add({"x": JudgeReply("1"), "y": JudgeReply(None, "dead")})
    other.add({"x": JudgeReply("2"), "z": JudgeReply("3")})
    with path.open("a") as file:
        file.write('{"request": "torn", "ans')
    one.add({"last": JudgeReply("4")})
    expected = {"x": ("1", None), "y": (None, "dead"), "z": ("3", None), "last": ("4", None)}
    assert one.replies == AnswerStore(path).replies == expected
    assert other.replies.keys() == {"x", "y", "z"}
    whole = [line for line in path.read_text().split("\n") if line.endswith("}")]
    assert len(whole) == 4, "each reply once"


def test_a_rank_uses_the_answer_that_another_rank_has_stored_meanwhile(build: Build) -> None:
    other = build(lambda *_: WORST)

    def ask(_: Mapping[str, Any], until: float) -> str:
        other.score_answers(answers("a"))
        return BEST

    assert build(ask).score_answers(answers("a")).scores == [0]


# ---- a server


Start = Callable[..., IsolatedReward]


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as running:
        yield running


@pytest.fixture
def start(tmp_path: Path, server: JudgeServer) -> Iterator[Start]:
    """Start a judge in its process, with a run directory that a test's judges share."""
    started: list[IsolatedReward] = []

    def start_judge(**keys: Any) -> IsolatedReward:
        given = {"rubric": write_rubric(tmp_path), "model": "m", "url": server.url} | keys
        part = RewardTerm(kind=RewardKind.judge, **{"retries": 0, "timeout_seconds": 20} | given)
        started.append(IsolatedReward("good", part, str(tmp_path)))
        return started[-1]

    yield start_judge
    for part in started:
        part.close()


def score(part: IsolatedReward, *responses: str) -> PartScores:
    part.send_answers(answers(*responses))
    return part.receive_scores()


@pytest.mark.parametrize(
    ("faults", "problem"),
    [
        (["prose", ""], ""),
        (["prose", "prose"], "the judge answered 'I like it.': Invalid JSON"),
        (["outside", "outside"], "clear=9: Input should be less than or equal to 5"),
        (["few", "few"], "short: Field required"),
        (["empty"], "the answer is not a chat completion"),
        (["401"], "HTTP status 401"),
        (["fenced"], ""),
        (["padded"], "its answer has more than 256 KiB"),
        (["long", "long"], "the judge's JSON is longer than 16384 characters"),
        (["503"], "HTTP status 503"),
        (["429 100000"], "HTTP status 429"),
        (["sleep"], "no answer within timeout_seconds=1"),
    ],
)
def test_a_judge_that_dies_lies_or_chats_fails_for_its_response_only(
    faults: list[str], problem: str, start: Start, server: JudgeServer
) -> None:
    part = start(timeout_seconds=1 if "sleep" in faults else 20, batch_size=1)
    assert part.criteria == ["clear", "short"]
    server.faults = [*faults]
    found = score(part, "a", *([] if "sleep" in faults else ["b"]))
    assert problem in found.problem
    assert bool(found.problem) is bool(problem)
    failed = [math.isnan(each) for each in found.scores]
    assert failed == [bool(problem), False][: len(failed)]
    assert [math.isnan(each) for each in found.criteria["clear"]] == failed
    part.part.timeout_seconds = 20
    assert not score(part, "c").problem, "the next batch is judged"


def test_a_judge_that_asks_to_wait_or_drips_holds_no_thread(
    start: Start, server: JudgeServer
) -> None:
    part = start(timeout_seconds=1, batch_size=2, retries=2)
    for fault in ("429 100000", "drip", "drip head"):
        server.faults = [fault] * 2
        assert score(part, f"{fault} 1", f"{fault} 2").problem
        assert not score(part, f"{fault} 3", f"{fault} 4").problem, "both threads are free"


def test_a_resumed_run_needs_neither_server_nor_key(
    start: Start, server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    first = score(start(token_variable="JUDGE_KEY"), "a", "b")
    assert not first.problem
    assert {*server.tokens} == {"Bearer sk-secret"}
    assert "sk-secret" not in (tmp_path / "verdicts.jsonl").read_text()
    monkeypatch.delenv("JUDGE_KEY")
    gone = start(token_variable="JUDGE_KEY", url="http://127.0.0.1:9/v1")
    assert score(gone, "a", "b") == first
    assert "url=http://127.0.0.1:9/v1/chat/completions: nothing answers" in score(gone, "c").problem
    again = start(token_variable="JUDGE_KEY")
    assert "token_variable=JUDGE_KEY: this variable is not set" in score(again, "c").problem


def test_of_an_answer_only_the_object_is_stored(build: Build, tmp_path: Path) -> None:
    """A model that reasons writes kilobytes around it, at each of thousands of requests."""
    build(lambda *_: f"Let me think.\n```json\n{BEST}\n```").score_answers(answers("a"))
    lines = filter(None, (tmp_path / "verdicts.jsonl").read_text().splitlines())
    assert [json.loads(line)["answer"] for line in lines] == [BEST]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"url": "http://127.0.0.1:9/v1"}, r"good\.url=http://127.0.0.1:9/v1.*: nothing answers"),
        ({"token_variable": "NOTHING"}, r"good\.token_variable=NOTHING: this variable is not set"),
        ({"rubric": "nowhere.yaml"}, r"good\.rubric=nowhere.yaml: cannot be read"),
    ],
)
def test_a_judge_that_cannot_be_used_is_refused_at_the_start(
    keys: dict[str, Any], message: str, start: Start
) -> None:
    with pytest.raises(ConfigError, match=message):
        start(**keys)


def test_a_process_that_is_killed_fails_for_its_batch(start: Start) -> None:
    part = start()
    part._process.close()
    with pytest.raises((FailureError, OSError)):
        part._receive()
    assert not score(part, "a").problem
