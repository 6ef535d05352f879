"""Direct preference optimisation."""

import pytest
import torch

from rlhf.algorithms.dpo import dpo_loss
from tests.algorithms.padded_batches import assert_close, f64


@pytest.mark.parametrize(
    ("beta", "loss"),
    [
        # log-ratios 3 and 1: h = 2, less 1 / (2 * beta), squared
        (0.25, 0.0),  # (2 - 2)^2
        (0.5, 1.0),  # (2 - 1)^2
        (1.0, 2.25),  # (2 - 0.5)^2
    ],
)
def test_ipo_by_hand(beta: float, loss: float) -> None:
    pairs = (f64(-1), f64(-4), f64(-4), f64(-5))
    result = dpo_loss(*pairs, beta=beta, loss="ipo")
    assert_close(result.loss, loss)
    assert_close(result.margin.value(), 2 * beta)
    turned = dpo_loss(*pairs, beta=beta, loss="ipo", label_smoothing=1.0)
    assert_close(turned.loss, (2 + 0.5 / beta) ** 2)


def test_large_margins_neither_overflow_nor_lose_their_gradient() -> None:
    # margins +-1000 at beta 1: losses 0 and 1000, slopes 0 and -1
    chosen_B = torch.tensor([-10.0, -1010.0], requires_grad=True)
    result = dpo_loss(
        chosen_B, torch.tensor([-1010.0, -10.0]), torch.zeros(2), torch.zeros(2), beta=1.0
    )
    result.loss.backward()
    assert_close(result.loss.detach(), 1000.0)
    assert_close(chosen_B.grad, [0.0, -1.0])
