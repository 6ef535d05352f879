"""Schema of ``rewards``: the parts of which a response's score is the weighted sum."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf.config.choices import RewardKind
from rlhf.config.schema.keys import ABOVE_0, AT_LEAST_0, SCORE, SECONDS, key


@dataclass(kw_only=True)
class RewardTerm:
    """One part of the score; docs/rewards.md lists the keys that each kind reads."""

    kind: RewardKind
    """model, gold, function, http, or a rule: length, stop, pattern, exact, number, json."""
    weight: float = key(SCORE, default=1.0)
    """Factor of this part in the sum."""
    normalise: bool = False
    """Subtract the mean and divide by the deviation of all rollouts so far, before weighting."""
    columns: list[str] = field(default_factory=list)
    """Columns of the data that the part reads beside prompt and response."""
    timeout_seconds: float = key(SECONDS, default=30.0)
    """Seconds in which a batch must be scored; then the part's process is ended."""
    fallback: float | None = key(SCORE, default=None)
    """Score of a response that the part failed to score; null: the run ends."""
    function: str | None = None
    """kind=function: MODULE:FUNCTION, called as f(prompts, responses, **columns)."""
    run_code: bool = False
    """kind=function: agree to run this function's code."""
    url: str | None = None
    """kind=http: address that gets prompts, responses and columns, and answers with scores."""
    token_variable: str | None = None
    """kind=http: environment variable whose value is sent as bearer token; null: none."""
    batch_size: int | None = key(ABOVE_0, default=None)
    """kind=http: responses in a request; null: the rank's whole rollout."""
    retries: int = key(AT_LEAST_0, default=2)
    """kind=http: further attempts after an error 5xx or a lost connection."""
    pattern: str | None = None
    """kind=pattern: regular expression; the score is 1 where it is found."""
    whole: bool = False
    """kind=pattern: the expression must match the whole response."""
    json_schema: str | None = None
    """kind=json: file of the JSON schema of a response; null: any JSON."""
    least: int = key(AT_LEAST_0, default=0)
    """kind=length: fewest response tokens with the full score."""
    most: int | None = key(ABOVE_0, default=None)
    """kind=length: most response tokens with the full score; null: no limit."""
    slack: int = key(AT_LEAST_0, default=0)
    """kind=length: tokens outside of least and most over which the score falls to 0."""
