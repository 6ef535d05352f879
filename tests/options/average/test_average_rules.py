"""A moving average on one rank, and in a plan; bad_commands.txt has what is refused."""

import pytest

from rlhf.config.choices import Device, Dtype
from rlhf.config.freeze import to_run_config
from rlhf.export import config_for_one_rank
from tests.conftest import Compose

pytestmark = pytest.mark.slow


def test_one_rank_that_exports_offloads_no_average(compose: Compose) -> None:
    config = to_run_config(compose(["zero.offload_ema=true", "ppo.ema_beta=0.9"]))
    assert not config_for_one_rank(config, Device.cpu, Dtype.fp32).zero.offload_ema
