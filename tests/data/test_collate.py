"""How rows are dealt to ranks by length, how pairs share a step, and where padding goes."""

import random
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.base.errors import DataError
from rlhf.base.random_streams import Shuffle
from rlhf.base.ranks import Ranks
from rlhf.base.types import take_rows
from rlhf.data.collate import (
    assign_rows_to_ranks,
    collate_pairs,
    collate_prompts,
    collate_sequences,
    divide_pairs_into_steps,
    eval_batches,
    padded_width,
)
from tests.pretend_cuda.gpu import Event, Gpu

CPU = torch.device("cpu")
PAD = 9


def test_sequences_are_padded_right_and_the_end_token_is_kept() -> None:
    # pad and end token have the same id 9 here: lengths alone decide what counts
    batch = collate_sequences([[1, 2, 3, 9], [4, 9]], [2, 1], pad_id=PAD, device=CPU)
    assert batch.ids_BS.tolist() == [[1, 2, 3, 9], [4, 9, 9, 9]]
    assert batch.attend_BS.int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.keep_BS.int().tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]


def test_both_sides_of_a_pair_have_one_width() -> None:
    pairs = collate_pairs([[1, 2, 9]], [[1, 3, 4, 5, 9]], [1], pad_id=PAD, device=CPU)
    assert pairs.chosen.ids_BS.tolist() == [[1, 2, 9, 9, 9]]
    assert pairs.rejected.ids_BS.tolist() == [[1, 3, 4, 5, 9]]
    assert pairs.chosen.keep_BS.int().tolist() == [[0, 1, 1, 0, 0]]


def test_prompts_are_padded_left() -> None:
    draws = torch.rand(2, 3)
    batch = collate_prompts([[1, 2, 3], [4]], ["a", "b"], draws, pad_id=PAD, device=CPU)
    assert batch.ids_BP.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert batch.attend_BP.int().tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.texts == ["a", "b"]
    assert batch.draws_BT is draws


def test_a_gpu_gets_batches_without_a_wait(gpu: Gpu) -> None:
    there = torch.device("cuda", 0)
    ids, prompt_tokens = [[4, 5, 6], [7, 8]], [1, 1]
    with gpu.counting() as counts:
        batch = collate_sequences(ids, prompt_tokens, pad_id=0, device=there)
        rows = take_rows(batch, [1])
    assert counts.events[Event.to_device] == counts.events[Event.sync] == 0
    assert counts.events[Event.to_device_pinned] == 6
    assert rows.ids_BS.tolist() == [[7, 8, 0]]
    assert rows.keep_BS.tolist() == [[False, True, False]]


# ------------------------------------------------------------------------------- rows and pairs

sizes = st.integers(1, 4)


def micro_batches(parts: list[list[int]], lengths: list[int], micro: int) -> list[list[list[int]]]:
    """The lengths in every micro-batch of every rank."""
    return [
        [[lengths[row] for row in part[i : i + micro]] for i in range(0, len(part), micro)]
        for part in parts
    ]


def padded(batches: list[list[list[int]]]) -> int:
    return sum(max(batch) * len(batch) for part in batches for batch in part)


def test_rows_are_dealt_by_length() -> None:
    lengths = [3, 9, 1, 7, 8, 2, 6, 4]
    # longest first in twos: (9, 8), (7, 6), (4, 3), (2, 1); the rank with 9 has fewer tokens after
    # the other has 7 and 4
    assert assign_rows_to_ranks(lengths, ranks=2, micro=2) == [[1, 4, 5, 2], [3, 6, 7, 0]]
    assert assign_rows_to_ranks([9, 4, 3, 2, 1, 1], ranks=2, micro=1) == [[0, 4, 5], [1, 2, 3]]


@given(sizes, sizes, sizes, st.data())
def test_a_deal_is_a_permutation_that_pads_least(
    ranks: int, micro: int, turns: int, data: st.DataObject
) -> None:
    total = ranks * micro * turns
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=total, max_size=total))
    parts = assign_rows_to_ranks(lengths, ranks=ranks, micro=micro)
    assert sorted(chain(*parts)) == list(range(total))
    assert {len(part) for part in parts} == {micro * turns}
    batches = micro_batches(parts, lengths, micro)
    shuffled = random.Random(0).sample(range(total), total)
    for order in (range(total), shuffled):
        each = [list(order[i : i + micro * turns]) for i in range(0, total, micro * turns)]
        assert padded(batches) <= padded(micro_batches(each, lengths, micro))
    for part in batches:
        assert part == sorted(part, key=max, reverse=True), "each begins with its longest"
    work = [sum(map(max, part)) for part in batches]
    assert max(work) - min(work) <= max(lengths), "no rank has more than one row's length more"


def test_prompts_are_packed_whole() -> None:
    groups = [0, 0, 0, 1, 1, 0, 2]  # 4 + 2 + 1 pairs, and 5 slots
    steps = divide_pairs_into_steps(groups, batch_size=5, epochs=1, seed=1)
    order = Shuffle(3, seed=1).batch_indices(0, 3)
    members = {0: [0, 1, 2, 5], 1: [3, 4], 2: [6]}
    assert order == [1, 2, 0]
    assert steps[0].rows[:3] == members[1] + members[2]
    assert steps[0].weights[:3] == [0.5, 0.5, 1.0]
    assert steps[1].rows[:4] == members[0]
    assert steps[1].weights[:4] == [0.25] * 4


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.integers(6, 9),
    st.sampled_from([0.5, 1, 2]),
    st.integers(0, 99),
)
def test_every_prompt_weighs_one(
    counts: list[int], batch_size: int, epochs: float, seed: int
) -> None:
    groups = [group for group, count in enumerate(counts) for _ in range(count)]
    random.Random(seed).shuffle(groups)
    number = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    groups = [number[group] for group in groups]
    steps = divide_pairs_into_steps(groups, batch_size=batch_size, epochs=epochs, seed=seed)
    seen = 0
    for step in steps:
        assert seen < len(groups) * epochs, "no step after the last epoch"
        assert len(step.rows) == len(step.weights) == batch_size
        used = [row for row, weight in zip(step.rows, step.weights, strict=True) if weight]
        weight_of: dict[int, float] = {}
        for row, weight in zip(step.rows, step.weights, strict=True):
            weight_of[groups[row]] = weight_of.get(groups[row], 0.0) + weight
        times = {group: used.count(groups.index(group)) for group in weight_of}
        assert weight_of == pytest.approx(times), "1 for each time that a prompt is in the step"
        assert all(used.count(row) == times[groups[row]] for row in used), "never torn apart"
        assert step.num_prompts == sum(times.values())
        seen += len(used)
    assert seen >= len(groups) * epochs


def test_a_prompt_with_more_pairs_than_a_step_is_refused() -> None:
    with pytest.raises(DataError, match=r"reward\.batch_size=2: one prompt has 3 pairs.*=3 or mo"):
        divide_pairs_into_steps([0, 1, 0, 0], batch_size=2, epochs=1, seed=0)


def test_widths_are_few_and_keep_within_their_bounds() -> None:
    few = {1: 1, 64: 64, 65: 72, 128: 128, 129: 144}
    assert {tokens: padded_width(tokens, max_width=4096) for tokens in few} == few
    assert padded_width(290, max_width=300) == 300
    assert padded_width(290, max_width=0) == 290
    widths = {padded_width(n, max_width=2048) for n in range(64, 2049)}
    assert len(widths) == 5 * 8 + 1
    assert all(n <= padded_width(n, max_width=2048) <= 1.125 * n for n in range(1, 2049))


@pytest.mark.parametrize("lengths", [None, [3, 9, 1, 7, 5]])
def test_held_out_rows_are_covered_once(lengths: list[int] | None) -> None:
    by_rank = [
        list(eval_batches(5, batch_size=2, ranks=Ranks(rank, 2), lengths=lengths))
        for rank in range(2)
    ]
    turns = [turn for pair in zip(*by_rank, strict=True) for turn in pair]
    kept = [row for rows, keep_B in turns for row, keep in zip(rows, keep_B, strict=True) if keep]
    assert kept == ([0, 1, 2, 3, 4] if lengths is None else [1, 3, 4, 0, 2])
    assert [len(batches) for batches in by_rank] == [2, 2]
