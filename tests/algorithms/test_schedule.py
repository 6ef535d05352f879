"""Learning-rate schedules."""

from typing import get_args

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algorithms.schedule import ScheduleName, build_lr_schedule
from tests.algorithms.padded_batches import quick

all_names = st.sampled_from(get_args(ScheduleName))


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        # two steps of warm-up, 1/2 and 2/2; then done = 0, 1/4, 2/4, 3/4, 4/4
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        # 1 - 0.9 * done
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        # 0.1 + 0.45 * (1 + cos(pi * done)), with cos 45 degrees = 0.7071068
        ("cosine", [0.5, 1.0, 1.0, 0.8681981, 0.55, 0.2318019, 0.1]),
        # the roots of 2/3, 2/4, 2/5, 2/6, 2/7
        ("inverse_sqrt", [0.5, 1.0, 0.8164966, 0.7071068, 0.6324555, 0.5773503, 0.5345225]),
    ],
)
def test_schedules_by_hand(name: ScheduleName, shares: list[float]) -> None:
    schedule = build_lr_schedule(name, warmup_steps=2, total_steps=7, min_ratio=0.1)
    assert [schedule(step) for step in range(7)] == pytest.approx(shares, abs=1e-7)
    if name != "inverse_sqrt":
        assert schedule(9) == pytest.approx(shares[-1]), "it stays after the last step"
    assert build_lr_schedule(name, warmup_steps=0, total_steps=5, min_ratio=0.1)(0) == 1.0


@quick
@given(name=all_names, warmup=st.integers(0, 20), total=st.integers(1, 20), step=st.integers(0, 60))
def test_no_step_leaves_the_range(name: ScheduleName, warmup: int, total: int, step: int) -> None:
    schedule = build_lr_schedule(name, warmup_steps=warmup, total_steps=total, min_ratio=0.0)
    assert 0.0 <= schedule(step) <= 1.0


def test_inverse_sqrt_stops_at_the_minimum() -> None:
    # sqrt(4 / 16) = 0.5, sqrt(4 / 100) = 0.2 and nothing below 0.2
    schedule = build_lr_schedule("inverse_sqrt", warmup_steps=4, total_steps=10, min_ratio=0.2)
    steps = (3, 15, 99, 100, 5000)
    assert [schedule(step) for step in steps] == pytest.approx([1.0, 0.5, 0.2, 0.2, 0.2])


def transformers_shares(name: str, *, warmup: int, total: int, steps: int) -> list[float]:
    """Learning rates of the scheduler that transformers has by this name, peak 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    own = {"polynomial": {"power": 1.0, "lr_end": 0.0}, "cosine_with_restarts": {"num_cycles": 1}}
    scheduler = transformers.get_scheduler(
        name, optimizer, warmup, total, scheduler_specific_kwargs=own.get(name)
    )
    shares = []
    for _ in range(steps):
        shares.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return shares


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("linear", "linear"),
        ("polynomial", "linear"),
        ("cosine", "cosine"),
        ("cosine_with_restarts", "cosine"),
        ("inverse_sqrt", "inverse_sqrt"),
        ("constant_with_warmup", "constant"),
    ],
)
@pytest.mark.parametrize("warmup", [1, 5])
def test_schedules_relate_to_those_of_transformers(
    theirs: str, ours: ScheduleName, warmup: int
) -> None:
    """Warm-up is theirs one step on (no first step of 0). The fall is theirs with one step less.

    Theirs would be 0 only after the last of ``total`` steps; ours has its minimum at the last step,
    so ``total - 1`` is what they have to be given. The inverse root is theirs one step on.
    """
    total = 20
    schedule = build_lr_schedule(ours, warmup_steps=warmup, total_steps=total, min_ratio=0.0)
    shares = [schedule(step) for step in range(total)]
    expected = transformers_shares(theirs, warmup=warmup, total=total - 1, steps=total + 1)
    assert shares[:warmup] == pytest.approx(expected[1 : warmup + 1], abs=1e-12)
    shift = 1 if ours == "inverse_sqrt" else 0
    assert shares[warmup:] == pytest.approx(expected[warmup + shift : total + shift], abs=1e-12)
    assert expected[0] == 0.0 < shares[0]
