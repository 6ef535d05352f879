"""Rules of adapters: each refusal names the key, its value and a way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.freeze import to_run_config

pytestmark = pytest.mark.slow

Compose = Callable[[list[str]], DictConfig]

HALVES = ["hardware.dtype=fp16", "lora=default"]
OWN = ["model=opt_125m", "model@reward_model=opt_125m"]  # models that have learned something


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["lora=default", "lora.roles=[]"],
            ["lora.roles=[]", "lora.rank=", "sft, reward, actor, critic"],
        ),
        (
            [*OWN, "lora=default", "lora.train_rest=true", "lora.export=adapter"],
            ["lora.export=adapter", "lora.train_rest=true", "use lora.export=merged"],
        ),
        (
            ["lora=default", "lora.roles=[sft,actor]"],
            ["lora.roles has sft", "model.init=random", "lora.roles=[actor,critic]"],
        ),
        (
            [*OWN[:1], "model@reward_model=tiny", "lora=default", "lora.roles=[reward]"],
            ["lora.roles has reward", "reward_model.init=random", "lora.roles=[actor,critic]"],
        ),
        (
            ["zero=stage3_mixzpp", "hardware=8xa100_80g", "lora=default"],
            ["zero.quantize_frozen_weights=true with hardware.dtype=", "use hardware.dtype=fp16"],
        ),
        (
            ["zero=stage3", "zero.quantize_frozen_weights=true", "hardware=a100_40g"],
            ["zero.quantize_frozen_weights=true", "add lora=default", "hardware"],
        ),
        (
            [*OWN, "zero=stage3", "zero.quantize_frozen_weights=true", "lora=default"],
            ["zero.quantize_frozen_weights=true", "GPU profile of hardware"],
        ),
    ],
)
def test_refused(overrides: list[str], parts: list[str], compose: Compose) -> None:
    with pytest.raises(ConfigError) as caught:
        to_run_config(compose(overrides))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_allowed(compose: Compose) -> None:
    to_run_config(compose([*OWN, "lora=all", "lora.export=adapter"]))
    to_run_config(compose(["lora.rank=0", "lora.roles=[]"]))  # the other keys say nothing
    to_run_config(compose([*OWN, "zero=stage3_mixzpp", "hardware=8xa100_80g", *HALVES]))
