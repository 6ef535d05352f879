"""Rewards computed outside of this program: by a function of the user, or an HTTP endpoint."""

from __future__ import annotations

import inspect
import json
import os
import resource
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

from rlhf.base.errors import ConfigError, RewardError
from rlhf.base.finite_numbers import float_or_infinity
from rlhf.base.isolated_process import failure_reason, import_user_object
from rlhf.config.schema.rewards import RewardTerm
from rlhf.rewards.rules import Answers, ScoreFunction
from rlhf.rewards.sealed import sealed_copy

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

RETRIED = (429, 500, 502, 503, 504)  # HTTP statuses after which another attempt may succeed
SECONDS_TO_CONNECT = 5.0
LARGEST_ANSWER = 1 << 24  # bytes of an endpoint's answer, enough for a million scores
LARGEST_PROCESS = 1 << 30  # bytes of this process's memory; HTTP headers have no other limit
CHUNK = 1 << 16  # bytes of an answer to read at a time


def build_function_reward(part: RewardTerm) -> Callable[[Answers], Sequence[float]]:
    """Import ``part.function`` and return it as a ``ScoreFunction``, or raise ConfigError."""
    with sealed_copy(part) if part.sealed else nullcontext():
        called, file = import_user_object("function", str(part.function))
    try:
        inspect.signature(called).bind([], [], **{column: [] for column in part.columns})
    except BaseException as error:  # the user's object may raise anything
        raise ConfigError(
            f"function={part.function}: cannot be used as "
            f"f({', '.join(['prompts', 'responses', *part.columns])}): "
            f"{failure_reason(error, file)}"
        ) from error

    def score_answers(answers: Answers) -> Sequence[float]:
        try:
            result = called(answers.prompts, answers.responses, **answers.columns)
            return _convert_scores(result, len(answers.responses))
        except RewardError:
            raise
        except BaseException as error:  # a function may raise anything, SystemExit included
            raise RewardError(failure_reason(error, file)) from error

    return score_answers


def _convert_scores(result: Any, rows: int) -> list[float]:
    """Return a function's result (a list, an array, a tensor, an iterator) as a list of scores."""
    if isinstance(result, str | bytes | Mapping | Set):
        raise RewardError(f"it returned a {type(result).__name__}: must be a list of numbers")
    listed = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(listed, list | tuple):
        listed = list(islice(listed, rows + 1))  # an iterator may have no end
    for row, score in enumerate(listed):
        if isinstance(score, str | bytes):
            raise RewardError(f"it returned the text {score[:40]!r} as score {row}: not a number")
    return [float(score) for score in listed]


def build_http_reward(part: RewardTerm) -> ScoreFunction:
    """Return a ``ScoreFunction`` that gets scores from the endpoint ``part.url``.

    It posts ``{"prompts": [...], "responses": [...], "columns": {name: [...]}}`` and expects
    ``{"scores": [...]}``.

    Raises:
        ConfigError: if the token's environment variable is not set, or the URL has no listener.
    """
    post = connect_endpoint(part, str(part.url))
    resource.setrlimit(resource.RLIMIT_AS, (LARGEST_PROCESS, LARGEST_PROCESS))

    def score_answers(answers: Answers) -> list[float]:
        found: list[float] = []
        for batch in _split_answers(answers, part.batch_size or max(1, len(answers.responses))):
            try:
                found += _parse_scores(post(batch))
            except MemoryError as error:
                raise RewardError("its answer needs too much memory") from error
        return found

    return score_answers


Post = Callable[[Mapping[str, Any]], Any]


def connect_endpoint(part: RewardTerm, url: str, *, timeout: float | None = None) -> Post:
    """Return a function that posts a JSON object to ``url``, and returns the JSON of the answer.

    Several threads may call it at the same time. It raises RewardError if the last attempt fails;
    ``timeout`` is the longest wait for data, in seconds.

    Raises:
        ConfigError: if the token's environment variable is not set, or the URL has no listener.
    """
    import urllib3

    _require_listener(url)
    pool, headers = urllib3.PoolManager(maxsize=part.batch_size or 1), _build_headers(part)

    def post(content: Mapping[str, Any]) -> Any:
        retries = urllib3.Retry(
            part.retries,
            allowed_methods=None,
            status_forcelist=RETRIED,
            backoff_factor=0.2,
        )
        request: dict[str, Any] = {"method": "POST", "url": url, "body": json.dumps(content)}
        while True:
            answer, failure = None, None
            try:
                answer = pool.urlopen(
                    **request,
                    headers=headers,
                    timeout=timeout,
                    retries=False,
                    redirect=False,
                    preload_content=False,
                )
                status, body = answer.status, _read_body(answer)
                if status not in RETRIED:
                    return _parse_answer(status, body)
            except urllib3.exceptions.HTTPError as error:
                failure = error
            try:
                retries = retries.increment("POST", url, answer, failure)
            except urllib3.exceptions.HTTPError as error:
                cause = getattr(error, "reason", None) or error  # why the last attempt failed
                raise RewardError(failure_reason(cause, None)) from error
            retries.sleep(answer)

    return post


def _split_answers(answers: Answers, size: int) -> Iterator[dict[str, Any]]:
    """Yield the contents of requests, each with at most ``size`` responses."""
    for start in range(0, len(answers.responses), size):
        rows = slice(start, start + size)
        columns = {name: values[rows] for name, values in answers.columns.items()}
        batch = {"prompts": answers.prompts[rows], "responses": answers.responses[rows]}
        yield batch | {"columns": columns}


def _build_headers(part: RewardTerm) -> dict[str, str]:
    """Return the headers of each request, with the token if the part has one."""
    headers = {"Content-Type": "application/json"}
    if part.token_variable is not None:
        token = os.environ.get(part.token_variable)
        if token is None:
            raise ConfigError(f"token_variable={part.token_variable}: this variable is not set")
        if not (token.isascii() and token.isprintable()):
            raise ConfigError(f"token_variable={part.token_variable}: its value must be plain text")
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _require_listener(url: str) -> None:
    """Raise ConfigError if nothing accepts connections at the address."""
    from urllib3.util import parse_url

    try:
        place = parse_url(url)
        port = place.port or {"http": 80, "https": 443}[str(place.scheme)]
        socket.create_connection((str(place.hostname), port), SECONDS_TO_CONNECT).close()
    except (OSError, ValueError) as error:  # ValueError: not the name of a host
        raise ConfigError(f"url={url}: nothing answers there ({error})") from error


def _read_body(answer: BaseHTTPResponse) -> bytes:
    """Return the body of an endpoint's answer; raise RewardError if it is too large."""
    body = bytearray()
    try:
        for piece in answer.stream(CHUNK, decode_content=False):
            body += piece
            if len(body) > LARGEST_ANSWER:
                raise RewardError(f"its answer has more than {LARGEST_ANSWER >> 20} MiB")
    finally:
        answer.close()
    return bytes(body)


def _parse_answer(status: int, body: bytes) -> Any:
    if status != 200:  # noqa: PLR2004 - HTTP's OK
        raise RewardError(f"HTTP status {status}")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"the answer is not JSON ({failure_reason(error, None)})") from error


def _parse_scores(content: Any) -> list[float]:
    if not isinstance(content, dict) or not isinstance(content.get("scores"), list):
        raise RewardError('the answer is not {"scores": [...]}')
    for row, score in enumerate(content["scores"]):
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise RewardError(f"score {row} of the answer is {json.dumps(score)[:40]}: no number")
    return [float_or_infinity(score) for score in content["scores"]]
