"""Compute a part of the score in a separate process, so that it cannot hang the run.

Requests and answers are lines of JSON on a socket. The first request is the part's configuration;
its answer has the names of its criteria. Each later request is a batch of responses; its answer
has the fields of ``PartScores``. A failure is ``{"error": "..."}``. Prints go to stderr.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf.base.errors import ConfigError, RewardError, RlhfError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.isolated_process import SECONDS_TO_START, IsolatedProcess, serve_messages
from rlhf.config.choices import Phase, PlanMode, RewardKind
from rlhf.config.schema.keys import LARGEST_SCORE
from rlhf.config.schema.rewards import AnyRewardKind, RewardTerm
from rlhf.config.schema.run import RunConfig
from rlhf.methods import Part, installed_methods, parts_of
from rlhf.rewards.outside import build_function_reward, build_http_reward
from rlhf.rewards.rules import RULES, Answers, PartScores, ScoreFunction

# Kinds of rewards that the ranks compute themselves.
HERE = (RewardKind.model, RewardKind.gold, RewardKind.environment, RewardKind.scorer)
# Every other kind has a separate process, in which its builder makes a ``ScoreFunction``.
BUILDERS = {
    RewardKind.function: build_function_reward,
    RewardKind.http: build_http_reward,
    **RULES,
}


class RewardScorer(Part):
    """Base class of a method's reward: scores responses in another process, without torch."""

    def build(self, part: RewardTerm, run_dir: Path) -> tuple[ScoreFunction, list[str]]:
        """Return the function that scores responses, and the names of its criteria.

        Raises ConfigError, whose message begins with the key, if the part cannot be used.
        """
        raise NotImplementedError


class FailureError(Exception):
    """The error for a batch that a part could not score; its message is the reason in one line."""


class IsolatedReward:
    """A part of the score that a separate process computes.

    ``send_answers`` and ``receive_scores`` are separate, so that several parts compute at the same
    time.
    """

    criteria: Sequence[str] = ()  # names of the part's criteria, if it has criteria

    def __init__(self, name: str, part: RewardTerm, run_dir: str | None = None) -> None:
        """Start the process, or raise a ConfigError that names the key of the part."""
        self.name, self.part, self._run_dir = name, part, run_dir
        self.rows = 0  # number of responses in the latest request
        self._seconds, self._deadline = 0.0, 0.0  # time limit of this request, and its deadline
        self._send_failure: FailureError | None = None
        self._start_process()

    def _start_process(self) -> None:
        self._process = IsolatedProcess("rlhf.rewards.isolated:serve_scores")
        self._set_deadline(SECONDS_TO_START)
        try:
            self._send({"part": asdict(self.part), "run_dir": self._run_dir})
            answer = self._receive()
        except FailureError as error:
            raise ConfigError(f"rewards.{self.name} does not start: {error}") from error
        if "error" in answer:
            self.close()
            raise ConfigError(f"rewards.{self.name}.{answer['error']}")
        self.criteria = answer["criteria"]

    def send_answers(self, answers: Answers) -> None:
        """Send a batch to score; if this fails, ``receive_scores`` raises the error."""
        self.rows = len(answers.responses)
        self._send_failure = None
        try:
            if self._process.has_ended():
                self._start_process()
            self._set_deadline(self.part.timeout_seconds)
            self._send(answers._asdict())
        except (ConfigError, FailureError) as error:
            self._send_failure = FailureError(str(error))

    def receive_scores(self) -> PartScores:
        """Return the scores of the batch; NaN replaces a score that is too large or not finite.

        Raises:
            FailureError: if the part took too long, raised an error, ended or returned anything
                but one number for each response.
        """
        if self._send_failure is not None:
            raise self._send_failure
        answer = self._receive()
        if "error" in answer:
            raise FailureError(str(answer["error"]))
        result = PartScores(**answer)
        if len(result.scores) != self.rows:
            raise FailureError(f"it returned {len(result.scores)} scores for {self.rows} responses")
        scores = [score if abs(score) <= LARGEST_SCORE else math.nan for score in result.scores]
        return result._replace(scores=scores)

    def close(self) -> None:
        """End the process, and the processes that it started."""
        self._process.close()

    def _send(self, content: Mapping[str, Any]) -> None:
        try:
            self._process.send(content, self._deadline)
        except OSError as error:
            raise self._end_process(error) from error

    def _receive(self) -> Mapping[str, Any]:
        try:
            return self._process.receive(self._deadline)
        except OSError as error:
            raise self._end_process(error) from error

    def _set_deadline(self, seconds: float) -> None:
        self._seconds, self._deadline = seconds, time.monotonic() + seconds

    def _end_process(self, error: OSError) -> FailureError:
        """End the process after a socket error; return the error to raise."""
        self.close()
        if isinstance(error, TimeoutError):
            return FailureError(f"it took more than {self._seconds:g} s")
        return FailureError("its process ended")


def start_reward_processes(
    parts: Mapping[str, RewardTerm], run_dir: str | None = None
) -> dict[str, IsolatedReward]:
    """Start a process for each part that needs one; return them by name.

    Raises:
        ConfigError: if a part cannot be used; the other processes have then ended too.
    """
    started: dict[str, IsolatedReward] = {}
    try:
        for name, part in parts.items():
            if part.kind not in HERE:
                started[name] = IsolatedReward(name, part, run_dir)
    except ConfigError:
        end_reward_processes(started)
        raise
    return started


def end_reward_processes(parts: Mapping[str, IsolatedReward]) -> None:
    """End the processes of the parts."""
    for part in parts.values():
        part.close()


def check_reward_parts(config: RunConfig) -> None:
    """Raise ConfigError if a part of the score cannot be used, before any phase is trained."""
    parts = config.rewards if Phase.ppo in config.phase.order else {}
    if config.plan is PlanMode.only:  # a plan needs no running endpoint
        parts = {name: part for name, part in parts.items() if part.url is None}
    end_reward_processes(start_reward_processes(parts, config.run_dir))


def serve_scores(descriptor: int) -> None:
    """Answer the requests on the socket until its other end is closed."""
    serve_messages(descriptor, _answer_requests)


def _answer_requests(messages: Iterator[Any]) -> Iterator[dict[str, object]]:
    """Yield the answer to each request: the part's criteria, then the scores of each batch."""
    request = next(messages, None)
    if request is None:
        return
    try:
        part = RewardTerm(**request["part"] | {"kind": AnyRewardKind(request["part"]["kind"])})
        with translate_errors(lambda reason: ConfigError(f"kind={part.kind}: {reason}")):
            scorer, criteria = _build_scorer(part, Path(request["run_dir"] or ""))
    except RlhfError as error:
        yield {"error": str(error)}
        return
    yield {"criteria": criteria}
    for batch in messages:
        try:
            with translate_errors(RewardError):
                result = scorer(Answers(**batch))
            scores = result if isinstance(result, PartScores) else PartScores(list(result))
            answer: dict[str, object] = scores._asdict()
        except RlhfError as error:
            answer = {"error": str(error)}
        yield answer


def _build_scorer(part: RewardTerm, run_dir: Path) -> tuple[ScoreFunction, list[str]]:
    """Return the ``ScoreFunction`` of a part, and the names of its criteria, if it has criteria."""
    if part.kind in BUILDERS:
        build: Callable[[RewardTerm], ScoreFunction] = BUILDERS[part.kind]
        return build(part), []
    if part.kind == RewardKind.judge:
        from rlhf.options.judges.rewards import build_judge

        return build_judge(part, run_dir)
    owners = (method for method in installed_methods() if part.kind in method.reward_kinds)
    (scorer,) = parts_of(RewardScorer, (method.scorer() for method in owners))
    return scorer.build(part, run_dir)
