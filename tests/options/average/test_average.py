"""An average on the host is whole when it is read, and costs no wait while it is updated.

bad_commands.txt has what is refused.
"""

import torch
from torch import nn

from rlhf.config.choices import Device, Dtype
from rlhf.config.freeze import to_run_config
from rlhf.engine.masters import Masters
from rlhf.export import config_for_one_rank
from rlhf.options.average.moving_average import MovingAverage
from tests.conftest import Compose
from tests.pretend_cuda.gpu import Event, Gpu


def test_reading_waits_for_the_copies_of_the_last_update(gpu: Gpu) -> None:
    weights = nn.Parameter(torch.zeros(300, device="cuda"))
    average = MovingAverage(Masters([weights], lambda: None), beta=0.5, on_host=True)
    weights.data.fill_(1.0)
    with gpu.counting() as counts:
        average.update()
    assert counts.events[Event.sync] == 0
    assert counts.events[Event.to_host_pinned] == counts.events[Event.to_device_pinned] == 1
    with gpu.counting() as counts:
        (shard,) = average.shards
    assert counts.events[Event.sync] == 1  # a copy may still run
    assert shard.device.type == "cpu"
    assert shard.eq(0.5).all()
    with gpu.counting() as counts, average.swap_in():
        assert weights.eq(0.5).all()
    assert counts.events[Event.sync] >= 2


def test_one_rank_that_exports_offloads_no_average(compose: Compose) -> None:
    config = to_run_config(compose(["zero.offload_ema=true", "ppo.ema_beta=0.9"]))
    assert not config_for_one_rank(config, Device.cpu, Dtype.fp32).zero.offload_ema
