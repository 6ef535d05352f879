"""How a batch is divided over ranks that share sequences; bad_commands.txt has what is refused."""

import pytest

from rlhf.config.batches import batch_plans, num_data_parallel_ranks
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from tests.conftest import Compose

pytestmark = pytest.mark.slow

SIZE = "zero.sequence_parallel_size=2"
SFT = ["phase=sft", "zero=stage1", "hardware=cpu", "hardware.ranks_per_node=4", SIZE]


def test_ranks_that_share_sequences_divide_a_batch_as_one(compose: Compose) -> None:
    config = to_run_config(compose([*SFT, "sft.batch_size=6", "sft.micro_batch_size=1"]))
    assert num_data_parallel_ranks(config) == 2
    plan = batch_plans(config)[Phase.sft]
    assert (plan.per_rank, plan.accumulation) == (3, 3)
