"""Which parameters decay is decided by the whole of them, also where only a part is here."""

import torch
from torch import nn

from rlhf.algorithms.schedule import build_lr_schedule
from rlhf.engine.settings import OptimizerSettings, parameter_groups


def test_matrices_decay_and_vectors_do_not_sharded_or_whole() -> None:
    settings = OptimizerSettings(
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.5,
        max_grad_norm=1.0,
        schedule=build_lr_schedule("constant", warmup_steps=0, total_steps=1, min_ratio=1.0),
    )
    whole, sharded = nn.Linear(2, 3), nn.Linear(2, 3)
    for parameter in sharded.parameters():
        parameter.ds_shape = parameter.shape  # as DeepSpeed leaves a parameter under ZeRO-3
        parameter.data = torch.empty(0)
    for module in (whole, sharded):
        groups = {
            group["weight_decay"]: group["params"] for group in parameter_groups(module, settings)
        }
        assert list(groups) == [0.5, 0.0]
        assert groups[0.5][0] is module.weight
        assert groups[0.0][0] is module.bias
