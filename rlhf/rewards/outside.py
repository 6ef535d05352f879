"""Rewards from outside of this program: a Python function of the user's, or an HTTP endpoint."""

from __future__ import annotations

import inspect
import json
import os
import socket
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rlhf.config.schema.rewards import RewardPart
from rlhf.errors import ConfigError
from rlhf.rewards.answers import Answers, Scorer

RETRIED = (429, 500, 502, 503, 504)  # HTTP statuses after which another attempt may succeed
SECONDS_TO_CONNECT = 5.0


def function(part: RewardPart) -> Scorer:
    """Import ``part.function``, a function of prompts, responses and columns.

    Raises:
        ConfigError: if it cannot be imported, or does not take these arguments.
    """
    place, _, name = str(part.function).partition(":")
    try:
        called = getattr(import_module(place), name)
        inspect.signature(called).bind([], [], **{column: [] for column in part.columns})
    except Exception as error:  # the module's own code may raise anything
        raise ConfigError(
            f"function={part.function}: cannot be used as "
            f"f({', '.join(['prompts', 'responses', *part.columns])}): "
            f"{type(error).__name__}: {error}. Give MODULE:FUNCTION, importable from here"
        ) from error

    def scores(answers: Answers) -> Sequence[float]:
        result = called(answers.prompts, answers.responses, **answers.columns)
        listed = result.tolist() if hasattr(result, "tolist") else list(result)
        return [float(score) for score in listed]

    return scores


def http(part: RewardPart) -> Scorer:
    """Return a ``Scorer`` that asks the endpoint ``part.url``.

    It posts ``{"prompts": [...], "responses": [...], "columns": {name: [...]}}`` and expects
    ``{"scores": [...]}``.

    Raises:
        ConfigError: if the token's variable is not set, or nothing listens at the address.
    """
    import urllib3
    from urllib3.util import parse_url

    headers = {"Content-Type": "application/json"}
    if part.token_variable is not None:
        if part.token_variable not in os.environ:
            raise ConfigError(f"token_variable={part.token_variable}: this variable is not set")
        headers["Authorization"] = f"Bearer {os.environ[part.token_variable]}"
    place = parse_url(str(part.url))
    port = place.port or {"http": 80, "https": 443}[str(place.scheme)]
    try:
        socket.create_connection((str(place.hostname), port), SECONDS_TO_CONNECT).close()
    except OSError as error:
        raise ConfigError(f"url={part.url}: nothing answers there ({error})") from error
    pool = urllib3.PoolManager(
        retries=urllib3.Retry(
            part.retries,
            redirect=0,
            allowed_methods=None,
            status_forcelist=RETRIED,
            backoff_factor=0.2,
        )
    )

    def scores(answers: Answers) -> list[float]:
        size = part.batch_size or max(1, len(answers.responses))
        found: list[float] = []
        for start in range(0, len(answers.responses), size):
            rows = slice(start, start + size)
            columns = {name: values[rows] for name, values in answers.columns.items()}
            batch = {"prompts": answers.prompts[rows], "responses": answers.responses[rows]}
            body = json.dumps(batch | {"columns": columns})
            answer = pool.request("POST", str(part.url), body=body, headers=headers)
            found += _scores_in(answer.status, answer.data)
        return found

    return scores


def _scores_in(status: int, body: bytes) -> list[float]:
    if status != 200:  # noqa: PLR2004 - HTTP's OK
        raise ValueError(f"HTTP status {status}")
    content: Any = json.loads(body)
    if not isinstance(content, dict) or not isinstance(content.get("scores"), list):
        raise ValueError('the answer is not {"scores": [...]}')
    return [float(score) for score in content["scores"]]
