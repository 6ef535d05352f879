"""Calls of a model's blocks, recorded so that a second branch can repeat them."""

import torch
from torch import Tensor, nn

from rlhf.models.branch import record_calls


class Block(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor, *, scale: float) -> Tensor:
        return scale * hidden + mask


def test_all_arguments_are_recorded_while_the_context_is_open() -> None:
    blocks = [Block(), Block()]
    hidden, mask = torch.ones(2), torch.tensor([3.0, 4.0])
    with record_calls(blocks) as calls:
        for block in blocks:
            hidden = block(hidden, mask, scale=2.0)
    blocks[0](hidden, mask, scale=1.0)
    assert len(calls) == 2
    for call in calls:
        assert call[1:] == ((mask,), {"scale": 2.0})
    assert torch.equal(calls[1][0], torch.tensor([5.0, 6.0]))
