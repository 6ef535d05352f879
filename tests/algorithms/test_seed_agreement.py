"""Agreement with DeepSpeed-Chat where its editions differ, and in the losses of pairs.

``tests/phases/ppo/test_deepspeed_chat_agreement.py`` compares a whole step of PPO. Here: kl 0.1,
scores clipped at 5, gamma 1, lam 0.95, no missing-end penalty. Prompts are left-padded; responses
end early, at the limit, and not at all.
"""

import math

import pytest
import torch
from torch import Tensor

from rlhf.algorithms.advantages import Advantages, clip_scores, gae, token_rewards
from rlhf.algorithms.dpo import dpo_loss
from rlhf.algorithms.kl import estimate_kl
from rlhf.algorithms.reward import divergence_loss, end_scores
from rlhf.data.collate import collate_pairs
from tests.algorithms import deepspeed_chat_loops as seeds
from tests.algorithms.deepspeed_chat_loops import Experience
from tests.algorithms.loop_reference import Rows
from tests.algorithms.padded_batches import assert_close, keep_of, normal
from tests.algorithms.token_sums import sequence_logprobs

P, T, V, END = 4, 5, 11, 1
PROMPTS, LENGTHS, ENDED = [2, 4, 3, 1], [3, 5, 5, 2], [True, False, True, True]
KEEP_BT, ENDED_B = keep_of(LENGTHS, T), torch.tensor(ENDED)
OWN_PAD, PAD_IS_END = 0, END
CPU = torch.device("cpu")
FP32, FP64 = 1e-6, 1e-9  # tolerances: the log-softmax is taken in fp32, the rest stays in fp64


def ids_of(pad_id: int) -> Tensor:
    """Left-padded prompts and right-padded responses, their end tokens included (B, P + T)."""
    rows = []
    for row, (prompt, length, has_end) in enumerate(zip(PROMPTS, LENGTHS, ENDED, strict=True)):
        words = [2 + (5 * row + 3 * i) % (V - 2) for i in range(prompt + length)]
        if has_end:
            words[-1] = END
        rows.append([pad_id] * (P - prompt) + words + [pad_id] * (T - length))
    return torch.tensor(rows)


def experience_of(ids_BS: Tensor, pad_id: int) -> Experience:
    """What random models say of these sequences; values and log-probs of padding are random too."""
    shape = len(ids_BS), P + T - 1
    old = -2 + 0.5 * normal(*shape, seed=0)
    reference, values = old + 0.4 * normal(*shape, seed=1), normal(*shape, seed=2)
    return Experience(
        ids_BS.tolist(),
        P,
        pad_id,
        old.tolist(),
        reference.tolist(),
        values.tolist(),
        [7.0, -6.0, 2.0, -0.5],  # two of them are clipped
    )


def our_targets(experience: Experience, keep_BT: Tensor) -> tuple[Tensor, Advantages]:
    """Rewards, and advantages with returns, in the reproducing configuration."""
    old, reference, values = (
        torch.tensor(rows, dtype=torch.float64)[:, P - 1 :] for rows in experience[3:6]
    )
    scores_B = clip_scores(
        torch.tensor(experience.scores, dtype=torch.float64),
        ENDED_B,
        clip=5.0,
        missing_end_penalty=0.0,
    )
    kl_BT = estimate_kl(old, reference, estimator="k1")
    rewards_BT = token_rewards(kl_BT, scores_B, keep_BT, kl_ctl=0.1)
    return rewards_BT, gae(rewards_BT, values, keep_BT, gamma=1.0, lam=0.95)


def responses(rows: Rows) -> Rows:
    """The response actions of rows of all actions."""
    return [row[P - 1 :] for row in rows]


def assert_kept(x_BT: Tensor, rows: Rows, keep_BT: Tensor = KEEP_BT) -> None:
    """Equal to the reading on every kept token."""
    assert_close(x_BT[keep_BT], torch.tensor(rows, dtype=torch.float64)[keep_BT], atol=FP64)


@pytest.mark.parametrize(("pad_id", "late"), [(OWN_PAD, False), (PAD_IS_END, True)])
def test_rewards_and_the_place_of_the_score(pad_id: int, late: bool) -> None:
    """Both editions, each with the padding that it is right for: the score is on the end token."""
    experience = experience_of(ids_of(pad_id), pad_id)
    rewards_BT, _ = our_targets(experience, KEEP_BT)
    theirs = seeds.compute_rewards(experience, late=late)
    assert_kept(rewards_BT, responses(theirs))
    for row, length in enumerate(LENGTHS):
        price = -0.1 * (
            experience.logprobs[row][P - 2 + length] - experience.ref_logprobs[row][P - 2 + length]
        )
        score = max(-5.0, min(5.0, experience.scores[row]))
        assert rewards_BT[row, length - 1].item() == pytest.approx(price + score, abs=FP64)
        assert ENDED[row] == (experience.ids[row][P + length - 1] == END)
    assert not rewards_BT[~KEEP_BT].any()


def test_advantages_of_the_early_edition_agree_where_no_padding_follows() -> None:
    """It lets rewards and values of the padding into the advantages of what came before."""
    experience = experience_of(ids_of(OWN_PAD), OWN_PAD)
    _, (advantages_BT, returns_BT) = our_targets(experience, KEEP_BT)
    theirs = seeds.targets(experience, late=False)
    full_B = KEEP_BT.all(dim=1)
    assert_kept(
        advantages_BT[full_B], [theirs.advantages[1], theirs.advantages[2]], KEEP_BT[full_B]
    )
    assert_kept(returns_BT[full_B], [theirs.returns[1], theirs.returns[2]], KEEP_BT[full_B])
    other_BT = (advantages_BT - torch.tensor(theirs.advantages))[~full_B]
    assert (other_BT[KEEP_BT[~full_B]].abs() > 1e-3).all()


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
    device=CPU,
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
        assert_close(end_scores(values, side.attend_BS), expected, atol=FP64)
    differs_B = ours_B.sub(torch.tensor([result.loss for result in theirs])).abs() > 1e-3
    assert differs_B.tolist() == [False, False, True, True, False]
    for row in (0, 1, 4):
        assert ours_B[row].item() == pytest.approx(theirs[row].loss, abs=FP64)
    held_BS = [held(x, side.attend_BS) for x, side in zip(values_BS, PAIR_BATCH, strict=True)]
    theirs = [seeds.reward_loss(pair, pad_id=OWN_PAD) for pair in pairs_of(*held_BS)]
    assert_close(ours_B, [result.loss for result in theirs], atol=FP64)


def test_reward_model_loss_of_a_pair_without_a_difference() -> None:
    """Theirs is log 2 at the last position, a constant; ours is 0. Neither teaches anything."""
    row = [5, 6, 7]
    batch = collate_pairs([row], [row], [2], pad_id=OWN_PAD, device=CPU)
    values_BS = normal(1, 3, seed=9)
    assert divergence_loss(values_BS, values_BS, batch).item() == 0.0
    values = values_BS[0].tolist()
    theirs = seeds.reward_loss(seeds.Pair(row, row, values, values), pad_id=OWN_PAD)
    assert theirs.loss == pytest.approx(math.log(2))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_dpo_loss(label_smoothing: float) -> None:
    """Its labels begin at the first difference, ours after the prompt: the common part cancels."""
    policy, reference = (
        [normal(5, 5, V, seed=seed + side) for side in (0, 1)] for seed in (10, 12)
    )
    for each in (policy, reference):  # common tokens come from common logits
        each[1][:, :2] = each[0][:, :2]
        each[1][4, 2] = each[0][4, 2]
    masks = [
        seeds.dpo_label_mask(*rows, pad_id=OWN_PAD)
        for rows in zip(*(side.ids_BS.tolist() for side in PAIR_BATCH), strict=True)
    ]
    ours, theirs = [], []
    for model in (policy, reference):
        for i, side in enumerate(PAIR_BATCH):
            ours.append(sequence_logprobs(model[i], side.ids_BS, side.keep_BS))
            mask = [pair[i] for pair in masks]
            theirs.append(seeds.batch_logps(model[i].tolist(), side.ids_BS.tolist(), mask))
            same_mask = sequence_logprobs(model[i], side.ids_BS, torch.tensor(mask).bool())
            assert_close(same_mask, theirs[-1], atol=5e-6)  # sums of up to three tokens in fp32
    result = dpo_loss(*ours, beta=0.1, label_smoothing=label_smoothing)
    losses = [
        seeds.dpo_loss((a, b), (c, d), label_smoothing) for a, b, c, d in zip(*theirs, strict=True)
    ]
    assert_close(result.mean_loss.value(), sum(losses) / len(losses), atol=FP32)
    margins = [0.1 * (a - b - c + d) for a, b, c, d in zip(*theirs, strict=True)]
    assert_close(result.margin.value(), sum(margins) / len(margins), atol=FP32)
    assert result.accuracy.value() == sum(margin > 0 for margin in margins) / len(margins)
