"""Padding: where it goes, and what is kept, by hand."""

import torch

from rlhf.base.types import take_rows
from rlhf.data.collate import collate_pairs, collate_prompts, collate_sequences
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
