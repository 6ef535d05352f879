"""Which parameters decay is decided by the whole of them, also where only a part is here."""

import torch
from torch import nn

from rlhf.engine.settings import parameter_groups
from tests.zero_settings import adamw


def test_matrices_decay_and_vectors_do_not_sharded_or_whole() -> None:
    whole, sharded = nn.Linear(2, 3), nn.Linear(2, 3)
    for parameter in sharded.parameters():
        parameter.ds_shape = parameter.shape  # as DeepSpeed leaves a parameter under ZeRO-3
        parameter.data = torch.empty(0)
    for module in (whole, sharded):
        found = parameter_groups(module, adamw(weight_decay=0.5))
        groups = {group["weight_decay"]: group["params"] for group in found}
        assert list(groups) == [0.5, 0.0]
        assert groups[0.5][0] is module.weight
        assert groups[0.0][0] is module.bias
