"""Score responses by the verdicts of a language model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf.base.errors import RewardError, RlhfError
from rlhf.config.schema.rewards import RewardTerm
from rlhf.options.judges.answer_store import AnswerStore, JudgeReply, hash_request
from rlhf.options.judges.keys import VERDICTS
from rlhf.options.judges.rubric import Rubric, cut_object, read_rubric
from rlhf.rewards.outside import connect_endpoint
from rlhf.rewards.rules import Answers, PartScores, ScoreFunction

REQUESTS_AT_ONCE = 16  # requests to a server at the same time, if batch_size is null
WAITING_SHARE = 0.9  # of timeout_seconds; in the rest of this time the answers are stored
LARGEST_ANSWER = 1 << 18  # bytes of an answer, in which a model may have reasoned at length

Body = dict[str, Any]  # the body of a request to a chat completion API
ScoreByCriterion = Mapping[str, float]  # score from 0 to 1 by criterion
Ask = Callable[[Body, float], str]  # called with a request and its deadline by time.monotonic


def build_judge(part: RewardTerm, run_dir: Path) -> tuple[ScoreFunction, list[str]]:
    """Return the judge, and the names of its criteria.

    Raises:
        ConfigError: if the rubric or, in a run without stored answers, the server cannot be used.
    """
    judge = Judge(part, read_rubric(str(part.rubric)), AnswerStore(run_dir / VERDICTS))
    if not (run_dir / VERDICTS).exists():  # a replayed run may need no answer that is not stored
        _ = judge.ask
    return judge.score_answers, [each.name for each in judge.rubric.criteria]


class Judge:
    """A language model that answers the questions of a rubric about each response.

    A response fails unless more than half of its votes are valid. A vote on a comparison is valid
    if the answers in both orders of the responses are valid.
    """

    def __init__(self, part: RewardTerm, rubric: Rubric, store: AnswerStore) -> None:
        self.part, self.rubric, self._store = part, rubric, store
        self._threads = ThreadPoolExecutor(part.batch_size or REQUESTS_AT_ONCE)

    @cached_property
    def ask(self) -> Ask:
        """Return the function that sends a request and returns its answer; connect on first use."""
        return connect_model(self.part)

    def score_answers(self, answers: Answers) -> PartScores:
        """Return the scores, from 0 to 1, of a batch of responses."""
        asked = [list(self._build_requests(answers, row)) for row in range(len(answers.responses))]
        replies = self._find_replies(
            {hash_request(each): each for votes in asked for vote in votes for each in vote}
        )
        verdicts: list[ScoreByCriterion] = []
        problem = ""
        names = [each.name for each in self.rubric.criteria]
        for votes in asked:
            answered = [[replies[hash_request(each)] for each in vote] for vote in votes]
            valid = [vote for vote in answered if all(each.failure is None for each in vote)]
            if 2 * len(valid) > len(votes):
                verdicts.append(self._average_verdicts(valid))
            else:
                verdicts.append(dict.fromkeys(names, math.nan))
                problem = problem or next(r.failure for vote in answered for r in vote if r.failure)
        scores = [self.rubric.weigh(each) for each in verdicts]
        return PartScores(scores, {n: [each[n] for each in verdicts] for n in names}, problem)

    def _build_requests(self, answers: Answers, row: int) -> Iterator[list[Body]]:
        """Yield the requests of each vote: one, or both orders of a comparison."""
        response, columns = answers.responses[row], answers.columns.values()
        orders = [[response]]
        for reference in (str(values[row]) for values in columns):
            orders = [[response, reference], [reference, response]]
        messages = [self.rubric.build_messages(answers.prompts[row], order) for order in orders]
        settings = {"model": self.part.model, "temperature": self.part.temperature}
        for vote in range(self.part.votes):
            shared = {**settings, "seed": vote, **self.rubric.request}
            yield [{**shared, "messages": each} for each in messages]

    def _find_replies(self, requests: Mapping[str, Body]) -> Mapping[str, JudgeReply]:
        """Return the reply of each request, by hash; send the requests that have none.

        A failure is stored only if the part has a fallback, with which the run continues.
        """
        deadline = time.monotonic() + WAITING_SHARE * self.part.timeout_seconds
        sent = {
            key: self._threads.submit(self._send, body, deadline)
            for key, body in requests.items()
            if key not in self._store.replies
        }
        wait(sent.values(), timeout=deadline - time.monotonic())
        late = JudgeReply(None, f"no answer within timeout_seconds={self.part.timeout_seconds:g}")
        replies = {key: each.result() if each.done() else late for key, each in sent.items()}
        for each in sent.values():
            each.cancel()
        stores_all = self.part.fallback is not None
        kept = {key: each for key, each in replies.items() if stores_all or each.failure is None}
        if kept:
            self._store.add(kept)
        return replies | self._store.replies

    def _send(self, request: Body, deadline: float) -> JudgeReply:
        """Return the reply to a request; after an invalid answer the model is asked once more."""
        try:
            answer = self.ask(request, deadline)
            try:
                self._read_verdict(answer)
            except RewardError as error:
                again = [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": f"{error}. Answer with the JSON object only."},
                ]
                asked_again = {**request, "messages": [*request["messages"], *again]}
                answer = self.ask(asked_again, deadline)
                self._read_verdict(answer)
        except RlhfError as error:
            return JudgeReply(None, str(error))
        return JudgeReply(cut_object(answer))

    def _average_verdicts(self, votes: Sequence[Sequence[JudgeReply]]) -> ScoreByCriterion:
        """Return the mean score of each criterion, over the votes and the orders of responses."""
        scores: dict[str, list[float]] = {}
        for vote in votes:
            for is_second, reply in enumerate(vote):  # the response is A first, then B
                for name, score in self._read_verdict(str(reply.answer)).items():
                    scores.setdefault(name, []).append(1 - score if is_second else score)
        return {name: fmean(each) for name, each in scores.items()}

    def _read_verdict(self, answer: str) -> ScoreByCriterion:
        return self.rubric.read_verdict(answer, compares=bool(self.part.columns))


def connect_model(part: RewardTerm) -> Ask:
    """Return a function that asks the model behind ``part.url``; it raises RewardError.

    Raises:
        ConfigError: if nothing answers there, or the token's environment variable is not set.
    """
    url = f"{str(part.url).rstrip('/')}/chat/completions"
    post = connect_endpoint(part, url, largest=LARGEST_ANSWER)

    def ask(request: Body, deadline: float) -> str:
        match post(request, deadline):
            case {"choices": [{"message": {"content": str(answer)}}, *_]}:
                return answer
        raise RewardError("the answer is not a chat completion with a text")

    return ask
