"""What the results of papers compute from their measurements."""

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from rlhf.data.synthetic import rate_response


def outcomes(module: ModuleType, *seeds: dict[str, Any]) -> str:
    """The outcome of these figures, one dictionary for each seed."""
    return str(module.RESULT.judge(dict(enumerate(seeds, start=1))).outcome)


def test_every_result_states_what_could_fail(load: Any) -> None:
    results = load("papers.__main__").all_results()
    assert len(results) >= 6
    for name, result in results.items():
        assert "passed:" in result.criterion.lower(), name
        assert "failed:" in result.criterion.lower(), name
        assert "https://" in result.source or "benchmarks/losses.md" in result.source, name


def test_the_best_of_n_is_ranked_by_score(load: Any) -> None:
    score_PN, gold_PN = torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([[0.2, 1], [0.4, 0.8]])
    found = [load("papers.best_of_many").gold_of_best(score_PN, gold_PN, n) for n in (1, 2)]
    assert found == pytest.approx([0.6, 0.5])


@pytest.mark.parametrize(("own", "other"), [("RL", "best-of-n"), ("best-of-n", "RL")])
def test_a_law_is_told_from_the_other(load: Any, own: str, other: str) -> None:
    laws = load("papers.overoptimisation_laws")
    distances = [0.4, 0.9, 1.5, 2.5, 4.0]
    gains = [d * (0.5 - 0.2 * laws.FORMS[own](d)) for d in distances]
    right, wrong = (laws.fitted(distances, gains, form) for form in (own, other))
    assert right["alpha"] == pytest.approx(0.5)
    assert right["beta"] == pytest.approx(0.2)
    assert right["residual"] < 1e-20 < wrong["residual"]


def test_gold_is_read_between_evaluations(load: Any) -> None:
    frontier = load("papers.penalty_frontier")
    points = ((0.0, 0.5), (1.0, 0.7), (3.0, 0.3))
    curve = [frontier.Evaluated(kl, score=0.0, gold=gold) for kl, gold in points]
    assert frontier.gold_at(curve, 0.5) == pytest.approx(0.6)
    assert frontier.gold_at(curve, 2.0) == pytest.approx(0.5)
    assert frontier.gold_at(curve, 3.5) is None


def test_hacking_is_told_by_hits_and_false_alarms(load: Any) -> None:
    hacking = load("papers.hacking")
    alarm, healthy, low = hacking.FROM_LOGS, [0.6] * 15, [0.6] * 6 + [0.5] * 9
    figures = {
        "gold: healthy": healthy,
        "gold: penalty": [0.5] * 15,
        "gold: token 4": low,
        "gold: token, KL penalty": healthy,
        "gold: format 2": [*low[:-1], 0.6],  # has recovered
        "gold: position 2": [*healthy[:-1], 0.6 - 0.9 * hacking.MARGIN],
        f"{alarm}: format 2": 9.0,
        f"{alarm}: token 4": 9.0,
    }
    early = figures | {f"{alarm}: token 4": hacking.ONSET - 1.0}
    false = figures | {f"{alarm}: healthy": 9.0, f"{alarm}: penalty": 20.0}
    assert outcomes(hacking, *[figures] * 5) == "passed"
    assert outcomes(hacking, *[figures] * 4) == "cannot be told"
    assert outcomes(hacking, *[early] * 5) == outcomes(hacking, *[false] * 5) == "failed"
    words = hacking.RESULT.judge({1: figures, 2: false}).found
    assert "token 2 of 2, length 0 of 0, sycophancy 0 of 0, position 0 of 2, format 0 of 2" in words
    assert f"{alarm} 2 of 2, lead +3, false 50" in words
    assert "stopping at the first of these alarms to none +0.100" in words, "step 10 is evaluated"
    assert "KL penalty to none +0.100 (+0.100 to +0.100)" in words


def test_verdicts_follow_the_criteria(load: Any) -> None:
    staleness = load("papers.staleness_limit")

    def lags(one: float, eight: float, noise: float) -> dict[str, float]:
        return {"gold, lag 0": 0.9, "gold, lag 1": 0.9 + one + noise, "gold, lag 8": 0.9 + eight}

    few = (-0.005, 0.0, 0.005)
    assert outcomes(staleness, *(lags(0.0, -0.2, n) for n in few)) == "passed"
    assert outcomes(staleness, *(lags(-0.1, -0.2, n) for n in few)) == "failed"
    assert outcomes(staleness, *(lags(0.0, 0.0, n) for n in few)) == "failed", "lag 8 costs nothing"
    assert outcomes(staleness, *(lags(0.0, -0.2, 20 * n) for n in few)) == "cannot be told"

    ensembles = load("papers.pessimistic_ensembles")
    golds = {"single": 0.3, "worst": 0.5, "uncertainty": 0.5, "mean": 0.4}
    seed = {f"gold after, {arm}": gold for arm, gold in golds.items()}
    worse = seed | {"gold after, worst": 0.1}
    assert outcomes(ensembles, seed, seed) == "passed"
    assert outcomes(ensembles, worse, worse) == "failed"
    assert outcomes(ensembles, seed, worse) == "cannot be told"


def test_agreement_falls_where_a_bias_takes_over(load: Any) -> None:
    rng = random.Random(0)

    def rollouts(bias: float) -> Iterator[dict[str, float]]:
        for step in range(2, 29, 2):
            for _ in range(128):
                gold = rng.gauss(0, 0.3)
                score = gold + (rng.gauss(0, bias) if step >= 12 else 0)
                yield {"step": step, "score": score, "part second": gold + rng.gauss(0, 0.3)}

    hacking = load("papers.hacking")
    assert hacking.falling_agreement(rollouts(1.0)) == 14, "the second step in a row"
    assert hacking.falling_agreement(rollouts(0.0)) is None
    alike = ({**line, "score": 1.0} for line in rollouts(0.0))
    assert hacking.falling_agreement(alike) is None, "scores without a difference"


def test_few_samples_are_told_by_their_weights(load: Any) -> None:
    def rollouts(heavy: int, kl: float = 9.0) -> Iterator[dict[str, float]]:
        for step in range(2, 29, 2):
            for place in range(100):
                yield {"step": step, "kl": 1000 + kl * (step in {8, 12, 14} and place >= heavy)}

    hacking = load("papers.hacking")
    assert hacking.few_samples(rollouts(35)) is None, "35 of 100 weights count"
    assert hacking.few_samples(rollouts(25)) == 14, "the second step in a row"
    assert hacking.few_samples(rollouts(1, 2.0)) is None, "99 of 100 are alike"


def test_the_worst_of_three_judges_needs_all_three_biases(load: Any) -> None:
    prompt = "\n\nHuman: Sort these numbers: 2 1.\n\nAssistant:"
    biases = {" Whatever.": 1 / 17, " 1 2" + "!" * 99: 0, " Whatever" + " !" * 10: 11 / 27}
    scores = load("papers.constructed_rewards").worst_of_three([prompt] * 3, [*biases])
    for (response, bias), score in zip(biases.items(), scores, strict=True):
        assert score == pytest.approx(rate_response(prompt, response).gold + 4 * bias)


def test_letters_are_counted_on_and_errors_have_no_mean(load: Any) -> None:
    chains = load("papers.chains")
    prompts = [f"\n\nHuman: {tag} count 8 from G\n\nAssistant:" for tag in range(400)]
    assert chains.right_answer(prompts[0]) == "HABCDEFG"
    for response, share, prefix, whole in (
        (" HABCDEFG", 1, 1, 1),
        (" HABCDEF", 0.875, 0.875, 0),
        (" HAACDEFG", 0.875, 0.25, 0),
        (" GABC", 0.375, 0, 0),
    ):
        assert chains.share(prompts[:1], [response]) == [share]
        assert chains.prefix(prompts[:1], [response]) == [prefix]
        assert chains.whole(prompts[:1], [response]) == [whole]
    by_three = "\n\nHuman: 5 count 6 from K by 3 of 12\n\nAssistant:"
    assert chains.right_answer(by_three) == "BEHKBE"
    some = chains.add_error(chains.share, deviation=0.3)
    with_error = torch.tensor(some(prompts, [" GABCDEFG"] * 400)) - 0.875
    assert with_error.std().item() == pytest.approx(0.3, rel=0.15)
    errors = torch.tensor(chains.noisy_share(prompts, [" GABCDEFG"] * 400)) - 0.875
    deviation = chains.NOISE * (chains.SHARE_WRONG * (1 - chains.SHARE_WRONG) / 8) ** 0.5
    assert errors.std().item() == pytest.approx(deviation, rel=0.15)
    assert abs(errors.mean().item()) < 3 * deviation / 20


@pytest.mark.parametrize(
    ("others", "outcome"), [(0.5, "passed"), (0.7, "failed"), (0.6, "cannot be told")]
)
def test_a_critic_must_beat_every_arm_without_one(load: Any, others: float, outcome: str) -> None:
    crossover = load("papers.crossover")
    seeds = []
    for shift in (-0.01, 0.0, 0.01):
        figures = {}
        for task in crossover.TASKS:
            figures[f"{task.title}: {crossover.CRITIC_FIRST}"] = 0.6 + shift
            for arm in crossover.WITHOUT_CRITIC:  # only one of the arms decides
                figures[f"{task.title}: {arm}"] = others if arm == "GRPO 16" else 0.5
        seeds.append(figures)
    assert outcomes(crossover, *seeds) == outcome


@pytest.mark.parametrize(("wrong", "outcome"), [(4, "passed"), (5, "failed")])
def test_advice_is_wrong_where_it_loses_much(load: Any, wrong: int, outcome: str) -> None:
    advice = load("papers.advice")
    prompts = [f"\n\nHuman: {tag} count 2 from A\n\nAssistant:" for tag in (3, 3, 4)]
    plain, tag = (
        getattr(advice, f"no_{offset}_share")(prompts, [" BC", " BB", " BC"])
        for offset in ("plain", "tag")
    )
    assert plain == [1, 0.5, 1]
    assert tag[0] - tag[1] == pytest.approx(0.5), "one offset for a prompt"
    assert tag[0] not in (1, tag[2])
    figures: dict[str, float | str] = {}
    for place, task in enumerate(advice.TASKS):
        figures |= {f"{task.title}: {arm}": 0.5 for arm in advice.ARMS}
        figures |= {f"{task.title}: RLOO 8": 0.53, f"{task.title}: PPO": 0.515}
        figures[task.title] = "GRPO 16" if place < wrong else "PPO"
    assert outcomes(advice, figures, figures) == outcome
    assert outcomes(advice, {task.title: "PPO" for task in advice.TASKS[:3]}) == "cannot be told"
