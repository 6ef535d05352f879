"""Data is divided without loss, without leaks, and always the same way."""

from collections import Counter
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.base.errors import DataError
from rlhf.config.choices import SPLIT_PHASES, Phase
from rlhf.data.records import Dropped, RawDataset, Record
from rlhf.data.splits import (
    PhaseData,
    apportion,
    blend_datasets,
    check_usable_examples,
    swap_answers,
)
from rlhf.data.splits import divide_over_phases as divide_all
from rlhf.phases.shared.context import records_with_label_noise

SPLIT = [2.0, 4.0, 4.0]
FEW = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def dataset(train: list[Record], held_out: list[Record] | None = None) -> RawDataset:
    return RawDataset("pets.jsonl", train, held_out, "preference", Dropped())


def divide_over_phases(
    data: RawDataset, *, split: list[float], eval_share: float, seed: int
) -> dict[Phase, PhaseData]:
    """The parts of one data set alone."""
    parts = divide_all([data], split=split, eval_share=eval_share, seed=seed)
    return {phase: part for phase, (part,) in parts.items()}


def answers(prompt: object, count: int = 1) -> list[Record]:
    """``count`` records with the same prompt."""
    return [Record(prompt=f"p{prompt}", chosen=f" {n}") for n in range(count)]


def groups_of(sizes: list[int]) -> list[Record]:
    return [record for prompt, size in enumerate(sizes) for record in answers(prompt, size)]


def everything(parts: dict[Phase, PhaseData]) -> list[Record]:
    return [record for part in parts.values() for record in part.train + part.eval]


def sizes_of(parts: dict[Phase, PhaseData]) -> list[tuple[int, int]]:
    return [(len(part.train), len(part.eval)) for part in parts.values()]


def keys(records: list[Record]) -> set[str | None]:
    return {record.text if record.prompt is None else record.prompt for record in records}


# -------------------------------------------------------------------------------- largest remainder


@pytest.mark.parametrize(
    ("total", "proportions", "sizes"),
    [
        (10, [2, 4, 4], [2, 4, 4]),
        (11, [2, 4, 4], [2, 5, 4]),  # quotas 2.2 4.4 4.4: the earlier of two equal fractions
        (12, [2, 4, 4], [2, 5, 5]),  # quotas 2.4 4.8 4.8
        (7, [0, 5, 5], [0, 4, 3]),  # DeepSpeed-Chat's rounding gives a boundary of -1 here
        (1, [1, 1, 1], [1, 0, 0]),
    ],
)
def test_largest_remainder_by_hand(total: int, proportions: list[float], sizes: list[int]) -> None:
    assert apportion(total, proportions) == sizes


proportions = st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(any)


@given(total=st.integers(0, 10**6), proportions=proportions)
def test_largest_remainder_is_complete_and_close(total: int, proportions: list[float]) -> None:
    sizes = apportion(total, proportions)
    assert sum(sizes) == total
    for size, proportion in zip(sizes, proportions, strict=True):
        assert abs(size - total * proportion / sum(proportions)) < 1 + 1e-6
        assert proportion > 0 or size == 0


# ------------------------------------------------------------------------------------------ divide


def test_distinct_prompts_are_divided_exactly() -> None:
    parts = divide_over_phases(dataset(groups_of([1] * 100)), split=SPLIT, eval_share=0.1, seed=0)
    assert list(parts) == list(SPLIT_PHASES)
    assert sizes_of(parts) == [(18, 2), (36, 4), (36, 4)]
    assert all(part.removed == 0 for part in parts.values())


@pytest.mark.parametrize(("share", "held_out"), [(0.0, 1), (0.001, 1), (0.25, 5), (1.0, 19)])
def test_at_least_one_is_held_out_and_never_all(share: float, held_out: int) -> None:
    parts = divide_over_phases(
        dataset(groups_of([1] * 20)), split=[1, 0, 0], eval_share=share, seed=0
    )
    assert sizes_of(parts) == [(20 - held_out, held_out), (0, 0), (0, 0)]


@FEW
@given(sizes=st.lists(st.integers(1, 9), min_size=12, max_size=60), seed=st.integers(0, 99))
def test_divided_is_complete_disjoint_and_deterministic(sizes: list[int], seed: int) -> None:
    records = groups_of(sizes)
    parts = divide_over_phases(dataset(records), split=SPLIT, eval_share=0.3, seed=seed)
    assert Counter(everything(parts)) == Counter(records)
    sides = [side for part in parts.values() for side in (part.train, part.eval)]
    for one, other in combinations(sides, 2):
        assert not keys(one) & keys(other)
    assert all(sides)
    assert parts == divide_over_phases(dataset(records), split=SPLIT, eval_share=0.3, seed=seed)


@FEW
@given(sizes=st.lists(st.integers(1, 5), min_size=60, max_size=90), seed=st.integers(0, 99))
def test_sizes_follow_the_proportions_as_closely_as_groups_allow(
    sizes: list[int], seed: int
) -> None:
    parts = divide_over_phases(dataset(groups_of(sizes)), split=SPLIT, eval_share=0.25, seed=seed)
    wanted = apportion(sum(sizes), SPLIT)
    for (train, held_out), size in zip(sizes_of(parts), wanted, strict=True):
        assert abs(train + held_out - size) <= 2 * max(sizes)
        assert abs(held_out - 0.25 * size) <= max(sizes)


@pytest.mark.parametrize("seed", range(5))
def test_groups_go_where_they_fit_and_small_ones_even_the_sizes_out(seed: int) -> None:
    # 15 and 5 are wanted: the second group of 6 must not go to the side of 5, though that is empty
    records = groups_of([6, 6, *[1] * 8])
    parts = divide_over_phases(dataset(records), split=[1, 0, 0], eval_share=0.25, seed=seed)
    assert sizes_of(parts)[0] == (15, 5)


def test_own_held_out_records_are_divided_too() -> None:
    held_out = [Record(prompt=f"e{n}") for n in range(10)]
    parts = divide_over_phases(
        dataset(groups_of([1] * 50), held_out), split=SPLIT, eval_share=0.5, seed=0
    )
    assert sizes_of(parts) == [(10, 2), (20, 4), (20, 4)]
    assert keys([r for part in parts.values() for r in part.eval]) == keys(held_out)


def test_training_records_with_a_held_out_prompt_of_any_phase_are_removed() -> None:
    train, held_out = groups_of([2] * 50), [Record(prompt=f"p{n}") for n in range(20)]
    parts = divide_over_phases(dataset(train, held_out), split=SPLIT, eval_share=0.1, seed=0)
    assert not keys([r for part in parts.values() for r in part.train]) & keys(held_out)
    assert sum(part.removed for part in parts.values()) == 40
    assert [len(part.train) + part.removed for part in parts.values()] == [20, 40, 40]


@pytest.mark.parametrize(
    ("sizes", "held_out", "split", "message"),
    [
        ([1] * 5, 0, SPLIT, r"5 examples\. .*split=\[2\.0, .*the sft phase gets 1 to train on and"),
        ([9], 0, [1.0, 0.0, 0.0], r"9 examples\. .* the sft phase gets 9 to train on and 0 held"),
        ([1] * 9, 0, [9.0, 0.0, 0.1], r"the ppo phase gets 0 to train on and 0 held out; .* needs"),
        ([], 0, SPLIT, r"set the share of the phases that you do not run to 0\.$"),
        ([1] * 50, 2, SPLIT, r"50 examples and 2 held-out ones\. .* and 0 held out;"),
    ],
)
def test_too_few_examples_are_refused(
    sizes: list[int], held_out: int, split: list[float], message: str
) -> None:
    own = [Record(prompt=f"e{n}") for n in range(held_out)] or None
    with pytest.raises(DataError, match=rf"^Data set pets\.jsonl has .*{message}"):
        divide_over_phases(dataset(groups_of(sizes), own), split=split, eval_share=0.1, seed=0)
    one, two = (dataset([Record(prompt="x")])._replace(name=name) for name in ("one", "two"))
    with pytest.raises(DataError, match=r"^Data sets one, two have 2 examples\. Divided by"):
        many(one, two)


# ------------------------------------------------------------------------------------------- blend


def test_blend_keeps_everything_in_another_order() -> None:
    one = PhaseData(groups_of([1] * 50), [Record(prompt=f"e{n}") for n in range(20)])
    two = PhaseData([Record(text="t")], [Record(text="u")], removed=3)
    blended = blend_datasets([one, two], seed=0)
    assert Counter(blended.train) == Counter(one.train + two.train)
    assert Counter(blended.eval) == Counter(one.eval + two.eval)
    assert blended.removed == 3
    assert blended.train != one.train + two.train
    assert blended == blend_datasets([one, two], seed=0)
    other = blend_datasets([one, two], seed=1)
    assert blended.train != other.train
    assert blended.eval != other.eval


# ------------------------------------------------------------------------------------ several sets


def many(*datasets: RawDataset, share: float = 0.25, seed: int = 0) -> dict[Phase, list[PhaseData]]:
    return divide_all(datasets, split=SPLIT, eval_share=share, seed=seed)


def normalised(records: list[Record]) -> set[str]:
    return {
        " ".join((r.text if r.prompt is None else r.prompt or "").split()).lower() for r in records
    }


chosen_prompts = st.lists(st.integers(0, 40), min_size=1, max_size=40)
kinds = st.sampled_from(["p{}", "P{}", " p{} ", "p{}\n", "text p{}"])  # the last has no prompt


@FEW
@given(
    sides=st.lists(st.tuples(chosen_prompts, st.none() | chosen_prompts, kinds), max_size=4),
    phases=st.lists(st.none() | st.just([Phase.sft]) | st.just([Phase.reward, Phase.ppo])),
    seed=st.integers(0, 9),
)
def test_no_prompt_is_in_two_phases_or_on_two_sides_of_any_sets(
    sides: list[tuple[list[int], list[int] | None, str]],
    phases: list[list[Phase] | None],
    seed: int,
) -> None:
    def records(numbers: list[int], kind: str) -> list[Record]:
        name = "text" if kind.startswith("text") else "prompt"
        return [Record(**{name: kind.removeprefix("text ").format(n)}) for n in numbers]

    datasets = [dataset([Record(prompt=f"q{n}") for n in range(50)])]
    for index, (train, held_out, kind) in enumerate(sides):
        own = None if held_out is None else records(held_out, kind)
        only = phases[index] if index < len(phases) else None
        datasets.append(dataset(records(train, kind), own)._replace(phases=only))
    divided = many(*datasets, seed=seed)
    seen = [
        normalised([r for part in parts for r in side(part)])
        for parts in divided.values()
        for side in (lambda part: part.train, lambda part: part.eval)
    ]
    for one, other in combinations(seen, 2):
        assert not one & other
    for index, data in enumerate(datasets):
        parts = [of_sets[index] for of_sets in divided.values()]
        given = len(data.train) + len(data.eval or [])
        assert sum(len(p.train) + len(p.eval) + p.removed for p in parts) == given
        for phase, part in zip(divided, parts, strict=True):
            assert data.phases is None or phase in data.phases or not (part.train or part.eval)


def test_common_prompt_follows_the_set_that_has_the_fewest_phases() -> None:
    for_all = dataset([*answers("same"), *groups_of([1] * 60)])
    for_sft = dataset([Record(prompt=" PSAME"), *[Record(prompt=f"x{n}") for n in range(9)]])
    divided = many(for_all, for_sft._replace(phases=[Phase.sft]))
    assert [part.removed for parts in divided.values() for part in parts] == [0] * 6
    sft = divided[Phase.sft]
    sides = [{"psame"} & normalised(side) for part in sft for side in (part.train, part.eval)]
    assert sides in ([{"psame"}, set(), {"psame"}, set()], [set(), {"psame"}, set(), {"psame"}])
    for phase in (Phase.reward, Phase.ppo):
        assert not divided[phase][1].train
        assert not divided[phase][1].eval


def test_common_prompt_of_sets_for_different_phases_is_removed_and_counted() -> None:
    one = dataset(groups_of([1] * 20))._replace(phases=[Phase.sft])
    two = dataset([*groups_of([2] * 5), *[Record(prompt=f"x{n}") for n in range(20)]])
    two = two._replace(phases=[Phase.reward])
    three = dataset([Record(prompt=f"y{n}") for n in range(40)])
    divided = many(one, two, three)
    assert [p.removed for p in divided[Phase.reward]] == [0, 10, 0]
    assert len(divided[Phase.reward][1].train) + len(divided[Phase.reward][1].eval) == 20


@pytest.mark.parametrize(
    ("split", "phases", "sizes"),
    [
        (SPLIT, [Phase.sft, Phase.ppo], [20, 0, 40]),  # 2 : 4
        ([0.0, 0.0, 1.0], [Phase.sft, Phase.reward], [30, 30, 0]),  # equal if none has a share
    ],
)
def test_phases_take_all_rows_in_the_proportions_of_the_split(
    split: list[float], phases: list[Phase], sizes: list[int]
) -> None:
    others = dataset([Record(prompt=f"x{n}") for n in range(60)])
    data = dataset(groups_of([1] * 60))._replace(phases=phases)
    divided = divide_all([others, data], split=split, eval_share=0.25, seed=0)
    assert [len(parts[1].train) + len(parts[1].eval) for parts in divided.values()] == sizes


@pytest.mark.parametrize(
    ("weight", "times"),
    [(2.0, {2: 30}), (0.5, {0: 15, 1: 15}), (1.5, {1: 15, 2: 15}), (0.001, {0: 29, 1: 1})],
)
def test_weight_repeats_training_examples_and_never_held_out_ones(
    weight: float, times: dict[int, int]
) -> None:
    data = dataset(groups_of([1] * 40))
    plain, weighted = (
        divide_all([d], split=[1.0, 0.0, 0.0], eval_share=0.25, seed=3)[Phase.sft][0]
        for d in (data, data._replace(weight=weight))
    )
    assert weighted.eval == plain.eval
    taken = Counter(weighted.train)
    assert Counter(taken[record] for record in plain.train) == Counter(times)


# --------------------------------------------------------------------------- what phases can learn


PROMPT_ONLY, ANSWERED = Record(prompt="p"), Record(prompt="p", chosen="a")
PAIR, TEXT = Record(prompt="p", chosen="a", rejected="b"), Record(text="t")


def test_phase_needs_its_kind_of_example_on_both_sides() -> None:
    served = {PROMPT_ONLY: {Phase.ppo}, ANSWERED: {Phase.sft, Phase.ppo}, PAIR: set(Phase)}
    for record, phases in (served | {TEXT: {Phase.sft}}).items():
        parts = dict.fromkeys(SPLIT_PHASES, PhaseData([PROMPT_ONLY, record], [record]))
        for phase in Phase:
            if phase in phases:
                check_usable_examples(parts, [phase])
            else:
                told = rf"^data: the {phase} phase finds no .* to .* supports: phase="
                with pytest.raises(DataError, match=told):
                    check_usable_examples(parts, [phase])
    parts = dict.fromkeys(SPLIT_PHASES, PhaseData([PAIR], [ANSWERED]))
    with pytest.raises(DataError, match=r"no pairs of responses to hold out among its 1 examples"):
        check_usable_examples(parts, [Phase.reward])


@pytest.mark.parametrize("grade", [True, False, 3.5])
def test_single_responses_with_a_grade_need_a_loss_that_reads_grades(grade: bool | float) -> None:
    graded = ANSWERED._replace(grade=grade)
    parts = dict.fromkeys(SPLIT_PHASES, PhaseData([graded], [graded]))
    for phase in (Phase.reward, Phase.dpo):
        said = rf"the {phase} phase learns from pairs .* reward\.loss=regression"
        with pytest.raises(DataError, match=said):
            check_usable_examples(parts, [phase])
    check_usable_examples(parts, [Phase.reward], learns_grades=True)
    check_usable_examples(parts, [Phase.ppo])


# ------------------------------------------------------------------- answers exchanged on purpose


PAIRS = [Record(f"p{n}", f"good {n}", f"bad {n}") for n in range(100)]
PART = PhaseData([*PAIRS, Record("p", "an answer without a rejected one")], PAIRS[:10])


def exchanged(part: PhaseData) -> list[int]:
    """The places of pairs whose answers are exchanged; all else must be as it was."""
    places = [n for n, record in enumerate(part.train) if record != PART.train[n]]
    assert len(part.train) == len(PART.train)
    assert [part.train[n] for n in places] == [
        PAIRS[n]._replace(chosen=f"bad {n}", rejected=f"good {n}") for n in places
    ]
    return places


def test_a_share_of_the_training_pairs_is_exchanged_by_the_seed() -> None:
    places = exchanged(swap_answers(PART, share=0.25, seed=1))
    assert len(places) == 25
    assert places == exchanged(swap_answers(PART, share=0.25, seed=1))
    assert places != exchanged(swap_answers(PART, share=0.25, seed=2))
    assert exchanged(swap_answers(PART, share=1.0, seed=1)) == list(range(100))
    assert swap_answers(PART, share=1.0, seed=1).eval == PART.eval


@pytest.mark.parametrize(("reward", "dpo"), [(0.5, 0.0), (0.0, 0.5)])
def test_reward_and_dpo_have_a_noise_of_their_own(reward: float, dpo: float) -> None:
    noise = {"reward": SimpleNamespace(label_noise=reward), "dpo": SimpleNamespace(label_noise=dpo)}
    config = SimpleNamespace(data_seed=1, **noise)
    context: Any = SimpleNamespace(parts={Phase.sft: PART, Phase.reward: PART}, config=config)
    found = [exchanged(records_with_label_noise(context, phase)) for phase in SPLIT_PHASES[:2]]
    found.append(exchanged(records_with_label_noise(context, Phase.dpo)))
    assert [len(places) / len(PAIRS) for places in found] == [0.0, reward, dpo]
