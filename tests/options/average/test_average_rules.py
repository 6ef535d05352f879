"""Rules of the moving average: each refusal names the key, its value and a way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Device, Dtype
from rlhf.config.freeze import to_run_config
from rlhf.export import config_for_one_rank
from rlhf.options import hooks_of

pytestmark = pytest.mark.slow

Compose = Callable[[list[str]], DictConfig]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["zero=stage3_nvme", "ppo.ema_beta=0.9"],
            ["zero.nvme_path=/local_nvme with ppo.ema_beta=0.9", "use ppo.ema_beta=0"],
        ),
        (["zero.offload_ema=true"], ["zero.offload_ema=true with ppo.ema_beta=0.0", "add ppo."]),
    ],
)
def test_refused(overrides: list[str], parts: list[str], compose: Compose) -> None:
    with pytest.raises(ConfigError) as caught:
        to_run_config(compose(overrides))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_allowed(compose: Compose) -> None:
    to_run_config(compose(["zero=stage3_nvme", "ppo.ema_beta=0.9", "zero.offload_optimizer=false"]))
    to_run_config(compose(["zero=stage3_nvme", "ppo.ema_beta=0.9", "phase.order=[sft,reward]"]))
    to_run_config(compose(["zero.offload_ema=true", "ppo.ema_beta=0.9"]))


def test_one_rank_that_exports_offloads_no_average(compose: Compose) -> None:
    config = to_run_config(compose(["zero.offload_ema=true", "ppo.ema_beta=0.9"]))
    assert not config_for_one_rank(config, Device.cpu, Dtype.fp32).zero.offload_ema


def test_the_plan_counts_its_evaluation(compose: Compose) -> None:
    config = to_run_config(compose(["ppo.ema_beta=0.9"]))
    assert [each(config) for each in hooks_of("costs", "num_added_evaluations", config)] == [1]
