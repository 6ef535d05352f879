"""Advantages over tokens with holes: observations between the turns of an episode."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms.advantages import gae
from rlhf.options.environments.turn_advantages import turn_gae
from tests.algorithms import loop_reference as reference
from tests.algorithms.padded_batches import assert_close, f64, normal, quick, seeds

shares = st.floats(0.0, 1.0)


def loop(
    rewards: list[float], values: list[float], last_value: float, *, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """The loop for tokens; ``last_value`` follows an episode that was cut."""
    carried = [*rewards[:-1], rewards[-1] + gamma * last_value]
    (advantages,), (returns,) = reference.gae([carried], [values], gamma=gamma, lam=lam)
    return advantages, returns


def turns_of(seed: int) -> Tensor:
    """Random turns of three rows: each begins with a turn and may end with an observation."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(3):
        sizes = torch.randint(1, 4, (6,), generator=generator).tolist()
        row = [
            turn if part == 0 else -1
            for turn in range(3)
            for part in (0, 1)
            for _ in range(sizes.pop())
        ]
        rows.append(row[: int(torch.randint(1, len(row) + 1, (1,), generator=generator))])
    width = max(map(len, rows)) + 1
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def numbers_of_turns(turn_BT: Tensor, *, seed: int) -> Tensor:
    """Random numbers of the turns' tokens, and NaN in observations."""
    return normal(*turn_BT.shape, seed=seed).masked_fill(turn_BT < 0, torch.nan)


@quick
@given(seeds, shares, shares, st.booleans())
def test_tokens_equal_a_loop_over_those_that_are_kept(
    seed: int, gamma: float, lam: float, is_cut: bool
) -> None:
    turn_BT = turns_of(seed)
    keep_BT = turn_BT >= 0
    rewards_BT, values_BT = (numbers_of_turns(turn_BT, seed=seed + part) for part in (0, 1))
    last_B = normal(len(turn_BT), seed=seed + 2) if is_cut else None
    found = gae(rewards_BT, values_BT, keep_BT, gamma=gamma, lam=lam, last_values_B=last_B)
    for row, keep_T in enumerate(keep_BT):
        last = 0.0 if last_B is None else float(last_B[row])
        sides = (rewards_BT[row][keep_T].tolist(), values_BT[row][keep_T].tolist())
        advantages, returns = loop(*sides, last, gamma=gamma, lam=lam)
        assert_close(found.advantages_BT[row][keep_T], advantages)
        assert_close(found.returns_BT[row][keep_T], returns)
    assert not found.advantages_BT[~keep_BT].any()
    assert not found.returns_BT[~keep_BT].any()


@quick
@given(seeds, shares, shares, st.booleans())
def test_turns_equal_a_loop_over_turns(seed: int, gamma: float, lam: float, is_cut: bool) -> None:
    turn_BT = turns_of(seed)
    rewards_BT, values_BT, costs_BT = (
        numbers_of_turns(turn_BT, seed=seed + part) for part in (0, 1, 3)
    )
    last_B = normal(len(turn_BT), seed=seed + 2) if is_cut else None
    found = turn_gae(
        rewards_BT, costs_BT, values_BT, turn_BT, gamma=gamma, lam=lam, last_values_B=last_B
    )
    for row, turn_T in enumerate(turn_BT):
        turns = range(int(turn_T.max()) + 1)
        rewards = [float(rewards_BT[row][turn_T == turn].sum()) for turn in turns]
        values = [float(values_BT[row][turn_T == turn][0]) for turn in turns]
        last = 0.0 if last_B is None else float(last_B[row])
        advantages, returns = loop(rewards, values, last, gamma=gamma, lam=lam)
        for turn in turns:
            own_T = turn_T == turn
            expected = [advantages[turn] - cost for cost in costs_BT[row][own_T].tolist()]
            assert_close(found.advantages_BT[row][own_T], expected)
            assert_close(found.returns_BT[row][own_T], [returns[turn]] * int(own_T.sum()))
    assert not any(x_BT[turn_BT < 0].any() for x_BT in found)


def test_a_turns_value_has_not_seen_the_turn() -> None:
    """Two answers, right and wrong, then an end token; the critic's values are exact."""
    rewards_BT, values_BT = f64(0, 1, 0, 0).view(2, 2), f64(0.5, 1, 0.5, 0).view(2, 2)
    turn_BT, free_BT = torch.zeros(2, 2, dtype=torch.long), torch.zeros_like(rewards_BT)
    found = turn_gae(rewards_BT, free_BT, values_BT, turn_BT, gamma=1.0, lam=1.0)
    assert found.advantages_BT.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    assert found.returns_BT.tolist() == [[1, 1], [0, 0]]
