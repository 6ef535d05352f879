"""The synthetic task: its answers, its gold scores and its preferences."""

import json
import math
from collections import Counter, defaultdict
from itertools import islice

import pytest

from rlhf.base.hashing import sha256_of
from rlhf.data import synthetic_pairs
from rlhf.data.records import Record
from rlhf.data.synthetic import (
    prompt_of_request,
    rate_response,
    right_answer,
    skill_of,
)
from rlhf.data.synthetic_pairs import GoldJudge, generate_records, preference_probability

pytestmark = pytest.mark.slow

SORT = prompt_of_request("Sort these numbers: 9 20 3 11.")  # 3 9 11 20
NUM_PAIRS = 10_000

# by hand, at least one for every skill
ANSWERS = [
    ("copy", "Repeat this: kiwi drum fig.", "kiwi drum fig"),
    ("reverse", "Say it backwards: kiwi drum fig.", "fig drum kiwi"),
    ("sort", "Sort these numbers: 9 20 3 11.", "3 9 11 20"),  # by number, not by text
    ("largest", "Which is the largest of 9 20 3 11?", "20"),
    ("next", "Ann: 9 fig, Bob adds one. Together?", "10"),
    ("ends", "Give the first and last of these: kiwi drum fig.", "kiwi fig"),
    ("format", "Put in brackets: kiwi drum fig.", "( kiwi drum fig )"),
    ("repeat", "Say the last one twice: kiwi fig.", "fig fig"),
]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Enough pairs for statistics."""
    return generate_records(NUM_PAIRS, seed=0)


def gap_of(record: Record) -> float:
    """Gold score of the chosen response less that of the rejected one."""
    better, worse = (rate_response(record.prompt or "", text or "") for text in record[1:3])
    return better.gold - worse.gold


@pytest.mark.parametrize(("skill", "request_", "answer"), ANSWERS)
def test_right_answers_by_hand(skill: str, request_: str, answer: str) -> None:
    prompt = prompt_of_request(request_)
    assert prompt == f"\n\nHuman: {request_}\n\nAssistant:"
    assert skill_of(prompt) == skill
    assert right_answer(prompt) == answer.split()


def test_a_foreign_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="not a prompt of the synthetic task: 'Hello'"):
        right_answer("Hello")


@pytest.mark.parametrize(
    ("response", "ended", "parts", "gold"),
    [
        # correct, polite, stops; gold = correct * (0.76 + 0.12 * polite + 0.12 * stops)
        (" Sure! 3 9 11 20.", True, (1, 1, 1), 1.0),
        (" 3 9 11 20.", True, (1, 0.2, 1), 0.904),
        (" Ugh. 3 9 11 20.", True, (1, 0, 1), 0.88),
        (" Sure! 3 9 11 20. I like rain.", True, (1, 1, 1 / 4), 0.91),  # 3 words
        (" Sure! 3 9 11 20." + " very" * 9, True, (1, 1, 0), 0.88),  # 9 words: not below 0
        (" Sure! 3 9 11 20.", False, (1, 1, 0), 0.88),  # never ended
        (" Sure! 3 9.", True, (0.25, 1, 1), 0.25),  # 2 of 4, halved
        (" Sure! 20 11 9 3.", True, (0, 1, 1), 0.0),  # all wrong
        (" Sure! 3 9 11 20 5.", True, (0.4, 1, 1), 0.4),  # 4 of the 5 given, halved
        (" Whatever. 3 1 1 1. I could go on.", False, (0.125, 0, 0), 0.095),
        (" Sure!", True, (0, 1, 1), 0.0),
        ("", False, (0, 0.2, 0), 0.0),
    ],
)
def test_gold_parts_by_hand(
    response: str, ended: bool, parts: tuple[float, ...], gold: float
) -> None:
    result = rate_response(SORT, response, ended=ended)
    assert tuple(result) == pytest.approx(parts, abs=1e-12)
    assert result.gold == pytest.approx(gold, abs=1e-12)
    rated = GoldJudge().rate(SORT, response, ended=ended)
    assert rated == {"gold": result.gold, "exact": float(parts[0] == 1), **result._asdict()}


def test_minimal_pairs_have_one_flaw() -> None:
    pairs = GoldJudge().minimal_pairs(SORT, seed=1)
    assert list(pairs) == ["one_item_wrong", "one_item_too_many", "one_item_missing"]
    for kind, (right, flawed) in pairs.items():
        best, worse = rate_response(SORT, right), rate_response(SORT, flawed)
        assert best.gold == 1.0
        assert worse[1:] == best[1:], "the manners are equal"
        shares = {"one_item_wrong": 3 / 8, "one_item_too_many": 4 / 10, "one_item_missing": 3 / 8}
        assert 0 <= worse.correct <= shares[kind]
    assert pairs == GoldJudge().minimal_pairs(SORT, seed=1)
    single = prompt_of_request("Which is the largest of 9 20 3 11?")
    assert set(GoldJudge().minimal_pairs(single, seed=1)) == {"one_item_wrong", "one_item_too_many"}


def test_records_are_those_of_every_version() -> None:
    # All draws of 600 records: flaws, manners, forgotten ones, preferences.
    texts = json.dumps([record.texts for record in generate_records(600, seed=3)])
    assert sha256_of(texts.encode()).startswith("bb4b08a0798b6795")
    assert generate_records(50, seed=3) == generate_records(80, seed=3)[:50]
    assert generate_records(50, seed=3) != generate_records(50, seed=4)


def test_a_skill_without_new_prompts_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.data.synthetic.WORDS", synthetic_pairs.WORDS[:4])
    prompts = [
        prompt for prompt, _ in islice(synthetic_pairs._draw_distinct_prompts(1000, seed=0), 1000)
    ]
    counts = Counter(map(skill_of, prompts))
    assert counts["repeat"] == 24  # three of four words in their order
    assert counts["sort"] > 1000 // 8
    assert len(set(prompts)) == 1000


def test_preferences_follow_bradley_terry(records: list[Record]) -> None:
    """In each bin of gaps the better response wins as often as the model says, to 4 sigma."""
    bins: dict[int, list[float]] = defaultdict(list)
    for gap in map(gap_of, records):
        if abs(gap) > 1e-9:
            bins[min(int(abs(gap) / 0.04), 8)].append(gap)
    assert len(bins) == 9
    for gaps in bins.values():
        probabilities = [preference_probability(abs(gap)) for gap in gaps]
        sigma = math.sqrt(sum(p * (1 - p) for p in probabilities))
        wins = sum(gap > 0 for gap in gaps)
        assert len(gaps) > 20
        assert abs(wins - sum(probabilities)) < 4 * sigma


def test_best_accuracy_by_hand() -> None:
    # gold 1.0 against 0.904: sigmoid(0.096 / 0.07) = 0.7976109, whichever is chosen; equal: 0.5
    good, fair, equal = " Sure! 3 9 11 20.", " 3 9 11 20.", " Happily! 3 9 11 20."
    pairs = [(good, fair), (fair, good), (good, equal)]
    made = [Record(prompt=SORT, chosen=chosen, rejected=rejected) for chosen, rejected in pairs]
    assert GoldJudge().expected_gold_accuracy(made[:1]) == pytest.approx(0.7976109, abs=1e-7)
    assert GoldJudge().expected_gold_accuracy(made[1:2]) == pytest.approx(0.7976109, abs=1e-7)
    # 2.0952217 / 3
    assert GoldJudge().expected_gold_accuracy(made) == pytest.approx(0.6984072, abs=1e-7)
