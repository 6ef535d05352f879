"""Ranks that share sequences: what is refused, and how a batch is divided over them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.batches import batch_plans, num_data_parallel_ranks
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config

Compose = Callable[[list[str]], DictConfig]

pytestmark = pytest.mark.slow

SIZE = "zero.sequence_parallel_size=2"
SFT = ["phase=sft", "zero=stage1", "hardware=cpu", "hardware.ranks_per_node=4", SIZE]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["phase=pipeline"],
            [f"{SIZE} with phase.order=[sft,reward,ppo]", "only SFT", "use phase=sft", "from_run"],
        ),
        (["phase=reward"], ["phase.order=[reward]", "zero=stage3"]),
        (["hardware.ranks_per_node=3"], [f"{SIZE} does not divide hardware.ranks_per_node=3"]),
        (["model.attention=eager"], [f"{SIZE} with model.attention=eager", "matmul or sdpa"]),
        (
            ["sft.batch_size=3"],
            ["sft.batch_size=3: must be a multiple of", "_node/zero.sequence_parallel_size=2; use"],
        ),
        (["zero.engine=torch"], ["zero.engine=torch", "use zero.engine=auto"]),
        (
            ["+zero.extra.sequence_parallel_size=2"],
            ["zero.extra.sequence_parallel_size=2", "use zero.sequence_parallel_size instead"],
        ),
    ],
)
def test_refusals(overrides: list[str], parts: list[str], compose: Compose) -> None:
    with pytest.raises(ConfigError) as caught:
        to_run_config(compose([*SFT, *overrides]))
    for part in parts:
        assert part in str(caught.value)


def test_ranks_that_share_sequences_divide_a_batch_as_one(compose: Compose) -> None:
    config = to_run_config(compose([*SFT, "sft.batch_size=6", "sft.micro_batch_size=1"]))
    assert num_data_parallel_ranks(config) == 2
    plan = batch_plans(config)[Phase.sft]
    assert (plan.per_rank, plan.accumulation) == (3, 3)
