"""Scores of an ensemble, combined by three rules."""

from hypothesis import given
from hypothesis import strategies as st

from rlhf_lab.ensembles.combined_scores import combine_scores, disagreement
from tests.algorithms.padded_batches import assert_close, normal, quick, seeds


@quick
@given(seed=seeds, members=st.integers(1, 6), rows=st.integers(1, 5))
def test_combinations_agree_with_a_loop(seed: int, members: int, rows: int) -> None:
    scores_BM = normal(rows, members, seed=seed)
    means, lowest, deviations = [], [], []
    for row in scores_BM.tolist():
        mean = sum(row) / members
        means.append(mean)
        lowest.append(min(row))
        deviations.append((sum((score - mean) ** 2 for score in row) / members) ** 0.5)
    assert_close(combine_scores(scores_BM, combine="mean", coef=9.0), means)
    assert_close(combine_scores(scores_BM, combine="worst", coef=9.0), lowest)
    expected = [m - 0.3 * d**2 for m, d in zip(means, deviations, strict=True)]
    assert_close(combine_scores(scores_BM, combine="uncertainty", coef=0.3), expected)
    assert_close(disagreement(scores_BM), deviations, atol=1e-7)
