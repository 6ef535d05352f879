"""From what is typed on the command line to the DeepSpeed JSON of each model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import DictConfig

from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Dtype
from rlhf.config.freeze import to_run_config
from rlhf.config.roles import Role
from rlhf.engine.deepspeed_config import deepspeed_config

Generate = Callable[..., dict[str, Any]]

CPU = {"device": "cpu", "pin_memory": True}


@pytest.fixture
def generated(compose: Callable[[list[str]], DictConfig]) -> Generate:
    """The JSON of a model under these overrides."""

    def config_of(role: Role, *overrides: str) -> dict[str, Any]:
        plan = BatchPlan(per_rank=8, micro=4, accumulation=2)
        zero = to_run_config(compose([*overrides])).zero
        return deepspeed_config(
            role, zero=zero, dtype=Dtype.fp16, plan=plan, max_grad_norm=0.5, ranks=16
        )

    return config_of


@pytest.mark.parametrize("role", [Role.sft, Role.actor, Role.critic, Role.reward_training])
def test_one_option_offloads_all_that_is_trained(role: Role, generated: Generate) -> None:
    section = generated(role, "zero=stage3_offload")["zero_optimization"]
    assert section["stage"] == 3
    assert (section["offload_optimizer"], section["offload_param"]) == (CPU, CPU)


def test_one_option_is_mixz_and_the_second_copy_needs_two_nodes(generated: Generate) -> None:
    gpus = ["hardware=8xa100_80g", "hardware.dtype=fp16", "lora=default"]
    config = generated(Role.actor, *gpus, "zero=stage3_mixzpp")["zero_optimization"]
    assert config["zero_quantized_nontrainable_weights"] is True
    assert config["zero_hpz_partition_size"] == 8
    plain = generated(Role.actor, *gpus, "zero=stage3")["zero_optimization"]
    assert not {name for name in plain if name.startswith("zero_")}


@pytest.mark.parametrize("role", list(Role))
def test_one_option_is_zeropp(role: Role, generated: Generate) -> None:
    config = generated(role, "hardware=8xa100_80g", "zero=stage3_zeropp")["zero_optimization"]
    assert config["zero_quantized_weights"] is True
    assert config.get("zero_quantized_gradients", False) is not role.is_frozen
    assert config["zero_hpz_partition_size"] == 8


def test_one_option_swaps_to_nvme(generated: Generate) -> None:
    config = generated(Role.critic, "zero=stage3_nvme")["zero_optimization"]
    place = {"device": "nvme", "nvme_path": "/local_nvme/critic", "pin_memory": True}
    assert (config["offload_optimizer"], config["offload_param"]) == (place, place)


@pytest.mark.slow
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
