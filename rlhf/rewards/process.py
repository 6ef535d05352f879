"""The process in which one part of the score is computed; see isolated.py for the other side.

Both sides send lines of JSON through a socket: first the part's configuration and the answer
whether it can be used, then for each batch its fields and ``{"scores": [...]}`` or
``{"error": "..."}``. What a function prints goes to stderr.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf.base.errors import ConfigError, RewardError, RlhfError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.isolated_process import serve_lines
from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.rewards.answers import Answers, ScoreFunction
from rlhf.rewards.outside import function, http
from rlhf.rewards.rules import RULES

KINDS = {RewardKind.function: function, RewardKind.http: http, **RULES}


def serve_scores(descriptor: int) -> None:
    """Answer the requests on the socket until its other end is closed."""
    serve_lines(descriptor, _answer_requests)


def _answer_requests(messages: Iterator[Any]) -> Iterator[dict[str, object]]:
    """Yield the answer to each request: first whether the part can be used, then its scores."""
    given = next(messages, None)
    if given is None:
        return
    try:
        part = RewardTerm(**given | {"kind": RewardKind(given["kind"])})
        with translate_errors(lambda reason: ConfigError(f"kind={part.kind}: {reason}")):
            scorer: ScoreFunction = KINDS[part.kind](part)
    except RlhfError as error:
        yield {"error": str(error)}
        return
    yield {"ready": True}
    for batch in messages:
        try:
            with translate_errors(RewardError):
                answer: dict[str, object] = {"scores": list(scorer(Answers(**batch)))}
        except RlhfError as error:
            answer = {"error": str(error)}
        yield answer
