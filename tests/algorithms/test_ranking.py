"""How well scores rank responses with grades."""

import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algorithms import ranking
from rlhf.algorithms.ranking import measure_ranking
from rlhf.base.intervals import wilson_interval
from tests.algorithms.padded_batches import quick


def loop_accuracy(scores: list[float], grades: list[float]) -> float | None:
    """The share of couples that the scores order as the grades do; equal scores count one half."""
    found = []
    for i, grade in enumerate(grades):
        for j, other in enumerate(grades):
            if grade > other:
                found.append((scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j]))
    return statistics.fmean(found) if found else None


rows = st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1)


@quick
@given(rows=rows, chunk=st.integers(1, 5))
def test_the_accuracy_agrees_with_a_loop(rows: list[tuple[int, float]], chunk: int) -> None:
    scores, grades = [float(score) for score, _ in rows], [grade for _, grade in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "CHUNK", chunk)
        found = measure_ranking(torch.tensor(scores), torch.tensor(grades))
    expected = loop_accuracy(scores, grades)
    if expected is None:
        assert found == (0.5, 0.0, 1.0, len(rows))
        return
    assert found.accuracy == pytest.approx(expected, abs=1e-12)
    assert 0 <= found.low <= found.accuracy + 1e-12
    assert found.accuracy - 1e-12 <= found.high <= 1


def test_perfect_scores_of_few_responses_are_not_certain() -> None:
    found = measure_ranking(torch.arange(5.0), torch.tensor([0.0, 0, 0, 1, 1]))
    assert found.accuracy == 1
    assert (found.low, found.high) == pytest.approx(wilson_interval(2, 2))


def test_one_bad_response_leaves_the_accuracy_open() -> None:
    found = measure_ranking(torch.arange(50.0), torch.arange(50) > 0)
    assert found.accuracy == 1
    assert found.low < 0.25


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_the_interval_covers_the_true_accuracy(share: float) -> None:
    # Scores of good and bad responses are normal, one deviation apart: the AUC is
    # Phi(1 / sqrt(2)) = 0.7602.
    rng, hits = random.Random(3), 0
    for _ in range(200):
        marks = torch.tensor([1.0 if rng.random() < share else 0.0 for _ in range(120)])
        noise = torch.tensor([rng.gauss(0, 1) for _ in range(120)])
        found = measure_ranking(marks + noise, marks)
        hits += found.low <= 0.7602 <= found.high
    assert 0.9 <= hits / 200 <= 0.99
