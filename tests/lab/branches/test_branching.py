"""Steps of responses, returns of branches, and advantages of steps, beside slow loops."""

import pytest
import torch

from rlhf_lab.branches.values import (
    choose_steps,
    rewards_to_go,
    step_advantages,
)

LENGTHS, GAMMA = [7, 1, 4], 0.8
KEEP_BT = torch.arange(7)[None] < torch.tensor(LENGTHS)[:, None]
REWARDS_BT = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).masked_fill(~KEEP_BT, 0)


def test_steps_end_before_any_token_equally_often() -> None:
    draws_N = torch.linspace(0, 0.999, 60)
    starts_N, ends_N = choose_steps(draws_N, torch.full((60,), 6), step_tokens=2)
    assert torch.bincount(ends_N).tolist() == [10] * 6
    assert starts_N.tolist() == [max(0, end - 2) for end in ends_N.tolist()]
    assert choose_steps(torch.tensor([1.0]), torch.tensor([3]), step_tokens=9)[1] == 2


def test_rewards_are_discounted_from_the_place_on() -> None:
    places = [3, 0, 2]
    found = rewards_to_go(REWARDS_BT, KEEP_BT, torch.tensor(places), gamma=GAMMA)
    for row, (place, length) in enumerate(zip(places, LENGTHS, strict=True)):
        rest = REWARDS_BT[row, place:length].tolist()
        assert float(found[row]) == pytest.approx(sum(GAMMA**t * r for t, r in enumerate(rest)))


@pytest.mark.parametrize("step_tokens", [1, 3, 9])
def test_advantages_of_steps(step_tokens: int) -> None:
    values_BT = torch.full_like(REWARDS_BT, torch.nan)
    for row, length in enumerate(LENGTHS):
        for start in range(0, length, step_tokens):
            values_BT[row, start] = 10 * row + start
    advantages_BT, returns_BT = step_advantages(REWARDS_BT, values_BT, KEEP_BT, gamma=GAMMA)
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            first = t // step_tokens * step_tokens
            end = min(first + step_tokens, length)
            after = 10 * row + end if end < length else 0

            def to_go(place: int, row: int = row, end: int = end, after: int = after) -> float:
                rest = [*REWARDS_BT[row, place:end].tolist(), after]
                return sum(GAMMA**t * r for t, r in enumerate(rest))

            value = 10 * row + first
            assert float(advantages_BT[row, t]) == pytest.approx(to_go(first) - value, abs=1e-5)
            expected = value if t == first else to_go(t)
            assert float(returns_BT[row, t]) == pytest.approx(expected, abs=1e-5)
    assert not advantages_BT[~KEEP_BT].any()
    assert not returns_BT[~KEEP_BT].any()
