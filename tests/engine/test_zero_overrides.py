"""From what is typed on the command line to the DeepSpeed JSON of each model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import DictConfig

from rlhf.config.checks import BatchPlan
from rlhf.config.choices import Dtype
from rlhf.config.freeze import to_run_config
from rlhf.config.roles import Role
from rlhf.engine.ds_config import deepspeed_config

Generate = Callable[..., dict[str, Any]]

CPU = {"device": "cpu"}


@pytest.fixture
def generated(compose: Callable[[list[str]], DictConfig]) -> Generate:
    """The JSON of a model under these overrides."""

    def config_of(role: Role, *overrides: str) -> dict[str, Any]:
        plan = BatchPlan(per_rank=8, micro=4, accumulation=2)
        zero = to_run_config(compose([*overrides])).zero
        return deepspeed_config(role, zero=zero, dtype=Dtype.bf16, plan=plan, max_grad_norm=0.5)

    return config_of


@pytest.mark.parametrize("role", [Role.sft, Role.actor, Role.critic, Role.reward_training])
def test_one_option_offloads_all_that_is_trained(role: Role, generated: Generate) -> None:
    section = generated(role, "zero=stage3_offload")["zero_optimization"]
    assert section["stage"] == 3
    assert (section["offload_optimizer"], section["offload_param"]) == (CPU, CPU)


def test_mixz_needs_two_keys(generated: Generate) -> None:
    mixz = ["zero.quantize_frozen_weights=true", "zero.hpz_partition_size=8"]
    gpus = ["hardware=8xa100_80g", "zero=stage3", "lora=default"]
    config = generated(Role.actor, *gpus, *mixz)["zero_optimization"]
    assert config["zero_quantized_nontrainable_weights"] is True
    assert config["zero_hpz_partition_size"] == 8
    plain = generated(Role.actor, *gpus)["zero_optimization"]
    assert not {name for name in plain if name.startswith("zero_")}


@pytest.mark.parametrize(
    ("field", "typed", "value"),
    [
        ("enabled", "true", True),
        ("pin_parameters", "false", False),
        ("release_inference_cache", "true", True),
        ("inference_tp_size", "2", 2),
        ("tp_gather_partition_size", "4", 4),
    ],
)
def test_fields_of_the_hybrid_engine_can_be_set(
    field: str, typed: str, value: object, generated: Generate
) -> None:
    config = generated(Role.actor, f"+zero.extra.hybrid_engine.{field}={typed}")
    assert config["hybrid_engine"] == {field: value}
    assert "hybrid_engine" not in generated(Role.actor)
