"""Rewards computed outside of this program: by a function of the user, or an HTTP endpoint."""

from __future__ import annotations

import inspect
import json
import os
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing, nullcontext, suppress
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from itertools import islice
from threading import Timer
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

from rlhf.base.errors import ConfigError, RewardError
from rlhf.base.finite_numbers import float_or_infinity
from rlhf.base.isolated_process import failure_reason, import_user_object
from rlhf.config.schema.rewards import RewardTerm
from rlhf.rewards.rules import Answers, ScoreFunction
from rlhf.rewards.sealed import sealed_copy

RETRY_STATUSES = (429, 500, 502, 503, 504)  # HTTP statuses after which a retry may succeed
SECONDS_TO_CONNECT = 5.0
LARGEST_ANSWER = 1 << 24  # bytes of an endpoint's answer, enough for a million scores
LARGEST_PROCESS = 1 << 30  # bytes of this process's memory; HTTP headers have no other limit
FIRST_PAUSE = 0.2  # seconds before the second attempt; doubles with each attempt
CONNECTIONS = {"http": HTTPConnection, "https": HTTPSConnection}


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
            f"{failure_reason(error, file)}. TRL's completions are responses here, as texts"
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

    The function posts ``{"prompts": [...], "responses": [...], "columns": {name: [...]}}`` and
    expects ``{"scores": [...]}``.

    Raises:
        ConfigError: if the token's variable has no plain text, or nothing listens at the URL.
    """
    post = connect_endpoint(part, str(part.url))
    resource.setrlimit(resource.RLIMIT_AS, (LARGEST_PROCESS, LARGEST_PROCESS))

    def score_answers(answers: Answers) -> list[float]:
        scores: list[float] = []
        deadline = time.monotonic() + part.timeout_seconds
        for batch in _split_answers(answers, part.batch_size or max(1, len(answers.responses))):
            try:
                scores += _parse_scores(post(batch, deadline))
            except MemoryError as error:
                raise RewardError("its answer needs too much memory") from error
        return scores

    return score_answers


Post = Callable[[Mapping[str, Any], float], Any]


def connect_endpoint(part: RewardTerm, url: str, *, largest: int = LARGEST_ANSWER) -> Post:
    """Return a function that posts a JSON object to ``url``, and returns the JSON of the answer.

    Several threads may call the function at the same time. Its second argument is its deadline by
    ``time.monotonic``. It raises RewardError if the last attempt fails, or the answer has more than
    ``largest`` bytes.

    Raises:
        ConfigError: if the token's variable has no plain text, or nothing listens at the URL.
    """
    address, headers = _require_listener(url), _build_headers(part)

    def post(content: Mapping[str, Any], deadline: float) -> Any:
        body = json.dumps(content).encode()
        for attempt in range(part.retries + 1):
            pause, cause = FIRST_PAUSE * 2**attempt, None
            try:
                status, retry_after, answer = _exchange(address, body, headers, deadline, largest)
                if status not in RETRY_STATUSES:
                    return _parse_answer(status, answer)
                reason, pause = f"HTTP status {status}", max(pause, _read_pause(retry_after))
            except TimeoutError as error:
                limit = f"timeout_seconds={part.timeout_seconds:g}"
                raise RewardError(f"no answer within {limit}") from error
            except (OSError, HTTPException) as error:
                reason, cause = failure_reason(error, None), error
            if attempt == part.retries or time.monotonic() + pause > deadline:
                break
            time.sleep(pause)
        raise RewardError(reason) from cause

    return post


def _exchange(
    address: SplitResult, body: bytes, headers: Mapping[str, str], deadline: float, largest: int
) -> tuple[int, str, bytes]:
    """Send a request; return status, Retry-After and body of the answer.

    The connection is shut down at ``deadline``: time limits of sockets are for each byte.
    """
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    connection = CONNECTIONS[address.scheme](str(address.hostname), address.port, timeout=seconds)
    with closing(connection):
        connection.connect()
        limit = Timer(deadline - time.monotonic(), _shut_down, [connection.sock])
        limit.start()
        try:
            target = urlunsplit(("", "", address.path or "/", address.query, ""))
            connection.request("POST", target, body, headers)
            with connection.getresponse() as answer:
                content = answer.read(largest + 1)
        finally:
            limit.cancel()
            if time.monotonic() >= deadline:
                raise TimeoutError
    if len(content) > largest:
        raise RewardError(f"its answer has more than {largest >> 10} KiB")
    if answer.length:  # the connection was lost
        raise IncompleteRead(content, answer.length)
    return answer.status, answer.getheader("Retry-After", ""), content


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):  # the exchange has just ended
        sock.shutdown(socket.SHUT_RDWR)


def _read_pause(text: str) -> float:
    """Return the seconds that a header Retry-After asks to wait; 0 if it cannot be read.

    The header has a number, which some servers write as "1.5" or "60s", or a date.
    """
    if (number := re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*s?\s*", text)) is not None:
        return float(number[1])
    with suppress(ValueError, OverflowError):
        return parsedate_to_datetime(text).timestamp() - time.time()
    return 0.0


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


def _require_listener(url: str) -> SplitResult:
    """Return the parts of an address; raise ConfigError if nothing accepts connections there."""
    try:
        address = urlsplit(url)
        port = address.port or {"http": 80, "https": 443}[address.scheme]
        socket.create_connection((str(address.hostname), port), SECONDS_TO_CONNECT).close()
    except (OSError, ValueError) as error:  # ValueError: not the name of a host
        raise ConfigError(f"url={url}: nothing answers there ({error})") from error
    return address


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
            raise RewardError(
                f"score {row} of the answer: {json.dumps(score)[:40]} is not a number"
            )
    return [float_or_infinity(score) for score in content["scores"]]
