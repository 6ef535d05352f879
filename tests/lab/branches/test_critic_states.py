"""Measures of a critic, from states of which everything is known."""

import random
import statistics

import pytest

from rlhf_lab.branches.critic_states import CriticState, measure_by_place, measure_critic

NOISE = 0.5


def some_states(*, slope: float, own_noise: float = 0.0, bias: float = 0.0) -> list[CriticState]:
    """States whose critic is a noisy linear function of the expected return."""
    rng = random.Random(0)
    states = []
    for pair in range(4000):
        for _ in range(2):
            expected = rng.gauss(0, 1)
            value = slope * expected + bias + rng.gauss(0, own_noise)
            branch_mean = expected + rng.gauss(0, NOISE)
            states.append(CriticState(pair, rng.random(), value, branch_mean, NOISE))
    return states


def test_an_exact_critic_is_exact_though_true_values_are_noisy() -> None:
    found = measure_critic(some_states(slope=1.0))
    assert found["error"] == pytest.approx(0, abs=0.02)
    assert found["bias"] == pytest.approx(0, abs=0.02)
    assert found["explained_variance"] == pytest.approx(1, abs=0.02)
    assert found["slope"] == pytest.approx(1, abs=0.02)
    assert found["ranking"] > 0.98


def test_a_poor_critic_is_measured_as_poor_as_it_is() -> None:
    found = measure_critic(some_states(slope=0.5, own_noise=0.5, bias=0.3))
    assert found["error"] == pytest.approx(0.25 + 0.25 + 0.09, abs=0.03)
    assert found["bias"] == pytest.approx(0.3, abs=0.02)
    assert found["explained_variance"] == pytest.approx(1 - 0.5, abs=0.03)
    assert found["slope"] == pytest.approx(0.5 / 0.5, abs=0.05)
    assert 0.7 < found["ranking"] < 0.95
    assert measure_critic(some_states(slope=0, own_noise=1))["ranking"] == pytest.approx(
        0.5, abs=0.05
    )


def test_only_pairs_that_can_be_told_apart_are_ranked() -> None:
    better, equal = CriticState(1, 0.1, 2.0, 1.0, 0.1), CriticState(1, 0.1, 1.0, 0.8, 0.1)
    assert measure_critic([better, equal]) == {}
    worse = equal._replace(true_value=0.5)
    assert measure_critic([better, worse]) == {"ranking": 1.0}
    assert measure_critic([better._replace(value=1.0), worse]) == {"ranking": 0.5}
    assert measure_critic([better, worse._replace(value=3.0)]) == {"ranking": 0.0}
    assert measure_critic([better, worse._replace(pair=2)]) == {}


def test_places_divide_states() -> None:
    states = some_states(slope=1.0)
    biased = [s._replace(value=s.value + (s.place >= 0.8)) for s in states]
    biases = {number: found["bias"] for number, found in measure_by_place(biased, bins=5).items()}
    assert list(biases) == [0, 1, 2, 3, 4]
    assert biases[4] == pytest.approx(1, abs=0.05)
    assert statistics.fmean(biases[n] for n in range(4)) == pytest.approx(0, abs=0.05)
