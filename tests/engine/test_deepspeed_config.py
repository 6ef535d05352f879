"""DeepSpeed's configuration beyond the options of conf/zero, which test_golden_configs.py has."""

from typing import Any

import pytest

from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Dtype
from rlhf.config.roles import Role, has_16_bit_weights, stage_of
from rlhf.engine.deepspeed_config import deepspeed_config
from rlhf.options import ZeroConfig
from tests.zero_settings import zero_config

PLAN = BatchPlan(per_rank=32, micro=8, accumulation=4)
RANKS = 16
FAST = {"overlap_comm": True, "contiguous_gradients": True}
SHARDED = {"stage": 3, "memory_efficient_linear": True}
CPU = {"device": "cpu", "pin_memory": True}
TRAINED_ROLES = {role for role in Role if not role.is_frozen}


def zero(**changes: Any) -> ZeroConfig:
    """Stage 0 with ``changes``."""
    return zero_config(**({"auto": False, "stage": 0} | changes))


def generated(role: Role, dtype: Dtype = Dtype.fp32, **changes: Any) -> dict[str, Any]:
    return deepspeed_config(
        role, zero=zero(**changes), dtype=dtype, plan=PLAN, max_grad_norm=0.5, ranks=RANKS
    )


def section_of(role: Role, **changes: Any) -> dict[str, Any]:
    return generated(role, **changes)["zero_optimization"]


@pytest.mark.parametrize(
    ("key", "roles"),
    [
        ("offload_parameters", TRAINED_ROLES),
        ("offload_reference", {Role.reference}),
        ("offload_reward", {Role.reward}),
    ],
)
def test_each_offload_of_parameters_has_its_models(key: str, roles: set[Role]) -> None:
    for role in Role:
        section = SHARDED | ({} if role.is_frozen else FAST)
        section |= {"offload_param": CPU} if role in roles else {}
        assert section_of(role, stage=3, **{key: True}) == section
        assert "offload_param" not in section_of(role, stage=2, **{key: True})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimiser_is_of_trained_models(stage: int) -> None:
    for role in Role:
        place = section_of(role, stage=stage, offload_optimizer=True).get("offload_optimizer")
        assert place == (None if role.is_frozen else CPU)


def test_what_quantises_comes_with_stage_3() -> None:
    changes = {"quantize_weights": True, "quantize_gradients": True, "hpz_partition_size": 8}
    changes["quantize_frozen_weights"] = True
    for role in Role:
        assert {name for name in section_of(role, stage=3, **changes) if "zero_" in name} == {
            *("zero_quantized_weights", "zero_hpz_partition_size"),
            *([] if role.is_frozen else ["zero_quantized_gradients"]),
            *([] if role.is_frozen else ["zero_quantized_nontrainable_weights"]),
        }
        assert not {name for name in section_of(role, stage=2, **changes) if "zero_" in name}


@pytest.mark.parametrize(("size", "written"), [(1, None), (2, 2), (8, 8), (16, None), (32, None)])
def test_a_second_copy_is_for_a_part_of_the_ranks(size: int, written: int | None) -> None:
    section = section_of(Role.actor, stage=3, hpz_partition_size=size)
    assert section.get("zero_hpz_partition_size") == written


def test_sizes_and_switches_have_deepspeeds_names() -> None:
    changes = {
        "overlap_comm": False,
        "memory_efficient_linear": False,
        "reduce_bucket_size": 11,
        "prefetch_bucket_size": 12,
        "max_live_parameters": 13,
        "param_persistence_threshold": 0,
    }
    of_stage_3 = {
        "stage": 3,
        "memory_efficient_linear": False,
        "stage3_prefetch_bucket_size": 12,
        "stage3_max_live_parameters": 13,
        "stage3_param_persistence_threshold": 0,
    }
    reducing = {"overlap_comm": False, "contiguous_gradients": True, "reduce_bucket_size": 11}
    for role in Role:
        frozen = role.is_frozen
        assert section_of(role, stage=3, **changes) == of_stage_3 | ({} if frozen else reducing)
        plain = {"stage": 0} if frozen else {"stage": 1, **reducing}
        assert section_of(role, stage=1, **changes) == plain


def test_the_window_of_the_loss_scale_is_of_fp16_only() -> None:
    half = generated(Role.actor, Dtype.fp16, stage=1, loss_scale_window=7)
    assert half["fp16"] == {"enabled": True, "loss_scale_window": 7}
    half = generated(Role.actor, Dtype.bf16, stage=1, loss_scale_window=7)
    assert half["bf16"] == {"enabled": True, "check_grad_overflow": True}


@pytest.mark.parametrize("own", [0, 3])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_frozen_models_may_have_a_stage_of_their_own(own: int, stage: int) -> None:
    config = zero(stage=stage, reference_stage=own, reward_stage=3 - own)
    assert stage_of(Role.reference, config) == own
    assert stage_of(Role.reward, config) == 3 - own
    section = section_of(Role.reference, stage=stage, reference_stage=own)
    assert section == (SHARDED if own else {"stage": 0})
    assert section_of(Role.actor, stage=stage, reference_stage=own)["stage"] == stage


@pytest.mark.parametrize(
    ("stage", "critic_stage", "critic", "reward"),
    [(3, 0, 0, 0), (3, 2, 2, 0), (0, 3, 3, 3), (2, None, 2, 0), (3, None, 3, 3)],
)
def test_critic_and_reward_model_may_have_a_stage_of_their_own(
    stage: int, critic_stage: int | None, critic: int, reward: int
) -> None:
    config = zero(stage=stage, critic_stage=critic_stage)
    assert (stage_of(Role.critic, config), stage_of(Role.reward, config)) == (critic, reward)
    for role in (Role.sft, Role.actor, Role.reward_training):
        assert stage_of(role, config) == stage
    assert stage_of(Role.reference, config) == (3 if stage == 3 else 0)


def test_extra_is_merged_last_and_deeply() -> None:
    extra = {
        "zero_optimization": {"reduce_bucket_size": 5, "overlap_comm": False},
        "steps_per_print": 10,
        "hybrid_engine": {"enabled": True, "max_out_tokens": 512},
    }
    assert generated(Role.actor, stage=1, extra=extra) == generated(Role.actor, stage=1) | {
        "zero_optimization": {
            "stage": 1,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": 5,
        },
        "steps_per_print": 10,
        "hybrid_engine": {"enabled": True, "max_out_tokens": 512},
    }
    assert extra["zero_optimization"] == {"reduce_bucket_size": 5, "overlap_comm": False}


@pytest.mark.parametrize(
    ("stages", "dtype", "half"),
    [
        ({"stage": 0}, Dtype.bf16, set()),  # autocast over fp32 weights
        ({"stage": 1}, Dtype.bf16, set(Role)),
        ({"stage": 2}, Dtype.fp32, set()),
        ({"stage": 3, "critic_stage": 0}, Dtype.bf16, set(Role) - {Role.critic, Role.reward}),
    ],
)
def test_which_weights_are_half(stages: dict[str, int], dtype: Dtype, half: set[Role]) -> None:
    assert {role for role in Role if has_16_bit_weights(role, zero(**stages), dtype)} == half
    assert {role for role in Role if "bf16" in generated(role, dtype, **stages)} == half
