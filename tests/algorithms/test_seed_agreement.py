"""Agreement with DeepSpeed-Chat in the losses of pairs.

``tests/phases/ppo/test_deepspeed_chat_agreement.py`` compares a whole step of PPO.
"""

import pytest
import torch
from torch import Tensor

from rlhf.algorithms.reward import divergence_loss, end_scores
from rlhf.data.collate import collate_pairs
from tests.algorithms import deepspeed_chat_loops as seeds
from tests.algorithms.padded_batches import assert_close, normal

END, OWN_PAD = 1, 0
PAIRS = [
    # a prompt of two tokens, then: the same length; the same length and padding after it
    ([5, 6, 7, 8, END], [5, 6, 9, 8, END]),
    ([5, 6, 7, END], [5, 6, 9, END]),
    # chosen shorter, rejected shorter, and a common first response token
    ([5, 6, END], [5, 6, 9, 8, END]),
    ([5, 6, 7, 7, END], [5, 6, 9, END]),
    ([5, 6, 7, 8, END], [5, 6, 7, 9, END]),
]
PAIR_BATCH = collate_pairs(
    [chosen for chosen, _ in PAIRS],
    [rejected for _, rejected in PAIRS],
    [2] * len(PAIRS),
    pad_id=OWN_PAD,
    device=torch.device("cpu"),
)


def pairs_of(*values_BS: Tensor) -> list[seeds.Pair]:
    """The pairs with these values of their tokens, as the reading takes them."""
    ids = (side.ids_BS.tolist() for side in PAIR_BATCH)
    values = (values.tolist() for values in values_BS)
    return [seeds.Pair(*parts) for parts in zip(*ids, *values, strict=True)]


def held(values_BS: Tensor, attend_BS: Tensor) -> Tensor:
    """Values whose padding repeats the end score."""
    return values_BS.where(attend_BS, end_scores(values_BS, attend_BS)[:, None])


def test_reward_model_loss_and_end_scores() -> None:
    """Equal where both sides are of one length; a shorter side takes part with its end score.

    There DeepSpeed-Chat reads whatever the model says of padding, and equals ours as soon as that
    is the end score.
    """
    values_BS = [2 * normal(5, 5, seed=7), 2 * normal(5, 5, seed=8)]
    ours_B = divergence_loss(*values_BS, PAIR_BATCH)
    theirs = [seeds.reward_loss(pair, pad_id=OWN_PAD) for pair in pairs_of(*values_BS)]
    for side, values, name in zip(
        PAIR_BATCH, values_BS, ("chosen_end", "rejected_end"), strict=True
    ):
        expected = [getattr(result, name) for result in theirs]
        assert_close(end_scores(values, side.attend_BS), expected, atol=1e-9)
    differs_B = ours_B.sub(torch.tensor([result.loss for result in theirs])).abs() > 1e-3
    assert differs_B.tolist() == [False, False, True, True, False]
    for row in (0, 1, 4):
        assert ours_B[row].item() == pytest.approx(theirs[row].loss, abs=1e-9)
    held_BS = [held(x, side.attend_BS) for x, side in zip(values_BS, PAIR_BATCH, strict=True)]
    theirs = [seeds.reward_loss(pair, pad_id=OWN_PAD) for pair in pairs_of(*held_BS)]
    assert_close(ours_B, [result.loss for result in theirs], atol=1e-9)
