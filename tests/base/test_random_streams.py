"""Named random streams and the endless shuffle."""

import torch

from rlhf.base.random_streams import Shuffle, random_stream, seed_for


def test_streams_differ_by_name_and_repeat_by_seed() -> None:
    seeds = {seed_for(1, "a"), seed_for(2, "a"), seed_for(1, "b"), seed_for(1, "a", 0)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert torch.equal(
        torch.rand(3, generator=random_stream(1, "a")),
        torch.rand(3, generator=random_stream(1, "a")),
    )


def test_every_epoch_shows_every_example_once_in_a_new_order() -> None:
    shuffle = Shuffle(6, seed=3)
    epochs = [[shuffle.batch_indices(2 * epoch + i, 3) for i in range(2)] for epoch in range(3)]
    orders = [first + second for first, second in epochs]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_a_batch_depends_on_its_step_alone() -> None:
    walked = Shuffle(7, seed=5)
    for step in range(9):
        expected = walked.batch_indices(step, 4)
        assert Shuffle(7, seed=5).batch_indices(step, 4) == expected
    assert len(Shuffle(3, seed=1).batch_indices(0, 8)) == 8  # a batch may be larger than the data
