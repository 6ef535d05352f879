"""Waits for an endpoint: what it asks for, and what is left of the time."""

import time
from collections.abc import Iterator

import pytest

from rlhf.base.errors import RewardError
from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.rewards.outside import connect_endpoint
from tests.rewards.endpoint import Endpoint, endpoint


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with endpoint() as running:
        yield running


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("drip", "no answer within timeout_seconds=30"),
        ("drip head", "no answer within timeout_seconds=30"),
        *((f"429 {far}", "HTTP status 429") for far in ("100000", "60s", "9" * 400)),
        ("429 Wed, 21 Oct 2065 07:28:00 GMT", "HTTP status 429"),
        *((f"429 {near}", None) for near in ("0.1", "0.1s", "-1", "", "soon", "1e5", "٣x")),
        ("429 Wed, 21 Oct 2015 07:28:00 GMT", None),
    ],
)
def test_no_wait_is_longer_than_the_time_that_is_left(
    fault: str, reason: str | None, server: Endpoint
) -> None:
    post = connect_endpoint(RewardTerm(kind=RewardKind.http, url=server.url, retries=1), server.url)
    server.faults, begun = [fault.encode().decode("latin-1")], time.monotonic()
    seconds = 0.4 if reason else 10
    if reason is None:
        assert post({"responses": ["abc"]}, begun + seconds) == {"scores": [3]}
    else:
        with pytest.raises(RewardError, match=reason):
            post({"responses": ["abc"]}, begun + seconds)
    assert time.monotonic() - begun < 5
