"""Reward models that share next to nothing, with a quarter of the labels wrong."""

from __future__ import annotations

from papers.claims import Figures, PaperResult, Place
from papers.pessimistic_ensembles import gold_of_arms, judge

# With 3 % of the pairs, as in the row without noise, the reward model of seed 0 was at chance.
NOISE = ("reward.label_noise=0.25", "reward.epochs=0.1")
# Members share embeddings and one of four layers.
OF_ENSEMBLES = ("reward.member_layers=3", "reward.member_epochs=0.1")


def measure(seed: int, place: Place) -> Figures:
    """Return the gold score before, at its best and after 80 steps without a penalty."""
    return gold_of_arms(seed, place, *NOISE, of_ensembles=OF_ENSEMBLES)


RESULT = PaperResult(
    title="Pessimistic ensembles with wrong labels",
    source="Coste et al., https://arxiv.org/abs/2310.02743, section 5, with 25 % label noise",
    claim="With a quarter of the labels wrong, the worst case of five reward models, and their "
    "mean minus their variance, reduce over-optimisation by PPO and reach more gold than a single "
    "model.",
    criterion="As for pessimistic ensembles, but with 10 % of the pairs, the answers of a quarter "
    "of these exchanged, and for each of the five members three of four layers of its own. Gold "
    "after 80 steps, paired by seed. Passed: the intervals of worst and of uncertainty, minus "
    "single, lie above 0. Failed: one of them lies below 0.",
    seeds=(1, 2, 3, 4, 5),
    minutes=15,
    measure=measure,
    judge=judge,
)
