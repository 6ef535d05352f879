"""The interface of trackers, which record metrics, samples, alarms and results of a run.

docs/watching.md describes how to record a run with a class of your own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.run.step_alarms import Alarm

LONG_CALL = 10  # times tracking.timeout_seconds: limit of a tracker's start, conclude and finish


class Token(NamedTuple):
    """A token of a response, with the numbers that the report shows."""

    text: str
    kl: float  # nats: log p of the policy minus log p of the reference
    # None without a critic:
    value: float | None = None  # the critic's value before the token
    advantage: float | None = None  # GAE, before whitening
    reward: float | None = None  # the score at the last token, minus the KL penalty


class Sample(NamedTuple):
    """A response to a held-out prompt, for samples.jsonl and the trackers."""

    prompt: str
    response: str
    ended: bool  # True if it ended by itself, within the token limit
    score: float
    kl: float  # nats of the whole response, k1 estimate of KL(policy || reference)
    tokens: Sequence[Token]
    gold_parts: Mapping[str, float] | None = None  # ratings of a judge, if there is one
    messages: Sequence[Mapping[str, str]] | None = None  # role and text; None: one response
    model: str = "actor"  # the policy that answered; "actor_ema" and others only at the end
    weights_step: int | None = None  # step of its weights if it is earlier (checkpoint.load_best)


class Tracker:
    """The base class of trackers, whose methods do nothing; trackers override what they need.

    Rank 0 makes and calls a tracker in a thread of its own, one call after another.
    """

    skips_repeats = False
    """True: a resumed run sends all earlier lines again, and the tracker skips those that it has.

    It lacks some if the run was killed, or if the tracker failed in an earlier attempt.
    """

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of one step; metrics.yaml lists their names."""

    def samples(self, phase: str, step: int, samples: Sequence[Sample], *, steps: int) -> None:
        """Record responses to a fixed set of prompts; the phase takes ``steps`` steps in all."""

    def alert(self, alarm: Alarm) -> None:
        """Record an alarm."""

    def append(self, log: str, phase: str, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Record lines of one step for ``log``, a file that an option adds to the run.

        By default, only the distributions of their numbers are recorded.
        """
        self.histograms(phase, step, numbers_by_field(log, lines))

    def histograms(self, phase: str, step: int, numbers: Mapping[str, Sequence[float]]) -> None:
        """Record the distributions of ``numbers``, finite numbers of one step by their name."""

    def conclude(self, result: Mapping[str, Any]) -> None:
        """Record the content of result.json, after the last phase."""

    def finish(self) -> None:
        """Flush and close the tracker."""


def numbers_by_field(log: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the finite floats in ``lines`` of the file ``log``, by LOG/NAME."""
    numbers: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            if isinstance(value, float) and math.isfinite(value):
                numbers.setdefault(f"{Path(log).stem}/{name}", []).append(value)
    return numbers
