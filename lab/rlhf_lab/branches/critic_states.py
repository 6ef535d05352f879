"""Measures of a critic against true values, from the states that ppo.critic_check samples."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

DISTINCT = 2.0  # two states are ranked if their true values are further apart, in standard errors
FEWEST = 3  # with fewer states, only the ranking is measured


class CriticState(NamedTuple):
    """A state in which the critic was checked: the critic's value, and an estimate of the true one.

    A state is a prompt and the first tokens of a response; its true value is the expected return.
    """

    pair: int  # number of the pair: two states after alternative steps from one earlier state
    place: float  # place of the state in its response, from 0 to 1
    value: float
    true_value: float
    error: float  # standard error of true_value


def measure_critic(states: Sequence[CriticState]) -> dict[str, float]:
    """Return measures of the critic by name, without those for which there are too few ``states``.

    Where sampling noise of true values would count as an error of the critic, it is subtracted:

    - error: mean squared error of the values.
    - bias: mean of value minus true value.
    - explained_variance: 1 - variance of the errors / variance of the true values.
    - slope: of the regression of true values on values; below 1 if values are too far apart.
    - ranking: share of pairs whose better state has the higher value; 0.5 by chance.
    """
    measures: dict[str, float] = {}
    if ranked := score_ranked_pairs(states):
        measures["ranking"] = statistics.fmean(ranked)
    if len(states) < FEWEST:
        return measures
    values = [state.value for state in states]
    true_values = [state.true_value for state in states]
    errors = [state.value - state.true_value for state in states]
    noise = statistics.fmean(state.error**2 for state in states)
    measures["error"] = statistics.fmean(error**2 for error in errors) - noise
    measures["bias"] = statistics.fmean(errors)
    spread = statistics.variance(true_values) - noise
    if spread > noise:  # a smaller spread would be mostly sampling noise
        measures["explained_variance"] = 1 - (statistics.variance(errors) - noise) / spread
    if len(set(values)) > 1:
        measures["slope"] = statistics.linear_regression(values, true_values).slope
    return measures


def measure_by_place(states: Sequence[CriticState], *, bins: int) -> Mapping[int, dict[str, float]]:
    """Return measures of the critic by number of the part, of ``bins`` equal parts of responses."""
    parts: list[list[CriticState]] = [[] for _ in range(bins)]
    for state in states:
        parts[min(int(state.place * bins), bins - 1)].append(state)
    return {number: measure_critic(part) for number, part in enumerate(parts)}


def score_ranked_pairs(states: Sequence[CriticState]) -> list[float]:
    """Return a number for each pair: 1 if its better state has the higher value, otherwise 0.

    The number is 0.5 if the values are equal. Pairs whose true values are too close to show which
    state is better are skipped.
    """
    ordered = sorted(states, key=attrgetter("pair"))
    pairs = [list(group) for _, group in groupby(ordered, key=attrgetter("pair"))]
    scores = [_score_pair(*pair) for pair in pairs if len(pair) > 1]
    return [score for score in scores if score is not None]


def _score_pair(one: CriticState, other: CriticState) -> float | None:
    """Return 1 if the better state has the higher value, 0.5 if the values are equal, else 0.

    Return None if the true values are too close to show which state is better.
    """
    difference = one.true_value - other.true_value
    if abs(difference) <= DISTINCT * (one.error**2 + other.error**2) ** 0.5:
        return None
    agreement = (one.value - other.value) * difference
    return 0.5 if agreement == 0 else float(agreement > 0)
