"""DeepSpeed's configuration, golden: whoever changes it sees here what changed."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Dtype, MomentsDtype, TrainingEngine
from rlhf.config.roles import Role, has_half_weights, stage_of
from rlhf.engine.deepspeed_config import deepspeed_config
from rlhf.options import ZeroConfig

PLAN = BatchPlan(per_rank=32, micro=8, accumulation=4)
RANKS = 16
QUIET = {"steps_per_print": 2**31, "wall_clock_breakdown": False, "prescale_gradients": False}
TRAINED = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    **QUIET,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
FROZEN = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    **QUIET,
}
FAST = {"overlap_comm": True, "contiguous_gradients": True}
SHARDED = {"stage": 3, "memory_efficient_linear": True}
BF16 = {"bf16": {"enabled": True}}
TRAINED_BF16 = {"bf16": {"enabled": True, "check_grad_overflow": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale_window": 100}}
CPU = {"device": "cpu", "pin_memory": True}
TRAINED_ROLES = [role for role in Role if not role.is_frozen]


def zero(**changes: Any) -> ZeroConfig:
    plain: dict[str, Any] = {
        "engine": TrainingEngine.auto,
        "moments": MomentsDtype.fp32,
        "auto": False,
        "stage": 0,
        "critic_stage": None,
        "reference_stage": None,
        "reward_stage": None,
        "offload_optimizer": False,
        "offload_parameters": False,
        "offload_reference": False,
        "offload_reward": False,
        "offload_ema": False,
        "nvme_path": None,
        "quantize_weights": False,
        "quantize_gradients": False,
        "quantize_frozen_weights": False,
        "hpz_partition_size": 1,
        "sequence_parallel_size": 1,
        "overlap_comm": True,
        "reduce_bucket_size": None,
        "prefetch_bucket_size": None,
        "max_live_parameters": None,
        "param_persistence_threshold": None,
        "memory_efficient_linear": True,
        "loss_scale_window": 100,
        "extra": {},
    }
    return ZeroConfig(**(plain | changes))


def generated(role: Role, dtype: Dtype = Dtype.fp32, **changes: Any) -> dict[str, Any]:
    return deepspeed_config(
        role, zero=zero(**changes), dtype=dtype, plan=PLAN, max_grad_norm=1.0, ranks=RANKS
    )


def test_actor_at_stage_0_in_fp32() -> None:
    assert generated(Role.actor) == TRAINED | {"zero_optimization": {"stage": 0}}


def test_critic_at_stage_2_in_bf16() -> None:
    section = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True}
    expected = TRAINED | {"zero_optimization": section} | TRAINED_BF16
    assert generated(Role.critic, Dtype.bf16, stage=2) == expected


@pytest.mark.parametrize(("stage", "frozen_stage"), [(0, 0), (1, 0), (2, 0), (3, 3)])
def test_frozen_models_have_no_optimiser(stage: int, frozen_stage: int) -> None:
    for role in (Role.reference, Role.reward):
        section = SHARDED if frozen_stage else {"stage": 0}
        expected = FROZEN | {"zero_optimization": section} | (FP16 if stage else {})
        assert generated(role, Dtype.fp16, stage=stage) == expected


@pytest.mark.parametrize("role", [Role.sft, Role.actor, Role.critic, Role.reward_training])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimiser_is_on_the_cpu(role: Role, stage: int) -> None:
    section = {"stage": stage, **FAST, "offload_optimizer": CPU}
    section |= SHARDED if stage == 3 else {}
    expected = TRAINED | {"zero_optimization": section}
    assert generated(role, stage=stage, offload_optimizer=True) == expected


@pytest.mark.parametrize("role", [Role.reference, Role.reward])
def test_a_frozen_model_has_no_optimiser_to_offload(role: Role) -> None:
    expected = FROZEN | {"zero_optimization": SHARDED}
    assert generated(role, stage=3, offload_optimizer=True) == expected


@pytest.mark.parametrize(
    ("key", "roles"),
    [
        ("offload_parameters", {Role.sft, Role.actor, Role.critic, Role.reward_training}),
        ("offload_reference", {Role.reference}),
        ("offload_reward", {Role.reward}),
    ],
)
def test_each_offload_of_parameters_has_its_models(key: str, roles: set[Role]) -> None:
    for role in Role:
        section = SHARDED | ({} if role.is_frozen else FAST)
        section |= {"offload_param": CPU} if role in roles else {}
        kind = FROZEN if role.is_frozen else TRAINED
        assert generated(role, stage=3, **{key: True}) == kind | {"zero_optimization": section}
        assert "offload_param" not in generated(role, stage=2, **{key: True})["zero_optimization"]


def test_what_quantises_comes_with_stage_3() -> None:
    """Frozen models send int8 too, and keep their precision: nothing of them is trained."""
    changes = {
        "quantize_weights": True,
        "quantize_gradients": True,
        "quantize_frozen_weights": True,
        "hpz_partition_size": 8,
    }
    for role in Role:
        section = SHARDED | {"zero_quantized_weights": True, "zero_hpz_partition_size": 8}
        if not role.is_frozen:
            section |= FAST | {
                "zero_quantized_gradients": True,
                "zero_quantized_nontrainable_weights": True,
            }
        kind = FROZEN if role.is_frozen else TRAINED
        assert generated(role, stage=3, **changes) == kind | {"zero_optimization": section}
        lower = generated(role, stage=2, **changes)["zero_optimization"]
        assert lower == ({"stage": 0} if role.is_frozen else {"stage": 2, **FAST})


@pytest.mark.parametrize(("size", "written"), [(1, None), (8, 8), (16, None), (32, None)])
def test_a_second_copy_is_for_a_part_of_the_ranks(size: int, written: int | None) -> None:
    section = generated(Role.actor, stage=3, hpz_partition_size=size)["zero_optimization"]
    assert section.get("zero_hpz_partition_size") == written


def test_sizes_have_deepspeeds_names_and_null_leaves_them_out() -> None:
    sizes = {
        "reduce_bucket_size": 11,
        "prefetch_bucket_size": 12,
        "max_live_parameters": 13,
        "param_persistence_threshold": 0,
    }
    of_stage_3 = {
        "stage3_prefetch_bucket_size": 12,
        "stage3_max_live_parameters": 13,
        "stage3_param_persistence_threshold": 0,
    }
    reducing = FAST | {"reduce_bucket_size": 11}
    for role in Role:
        section = SHARDED | of_stage_3 | ({} if role.is_frozen else reducing)
        assert generated(role, stage=3, **sizes)["zero_optimization"] == section
        plain = {"stage": 0} if role.is_frozen else {"stage": 1, **reducing}
        assert generated(role, stage=1, **sizes)["zero_optimization"] == plain


@pytest.mark.parametrize("role", TRAINED_ROLES)
def test_switches_are_written_as_they_stand(role: Role) -> None:
    section = generated(role, stage=3, overlap_comm=False, memory_efficient_linear=False)
    assert section["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "memory_efficient_linear": False,
    }


def test_the_window_of_the_loss_scale_is_of_fp16_only() -> None:
    half = generated(Role.actor, Dtype.fp16, stage=1, loss_scale_window=7)
    assert half["fp16"] == {"enabled": True, "loss_scale_window": 7}
    assert (
        generated(Role.actor, Dtype.bf16, stage=1, loss_scale_window=7)["bf16"]
        == TRAINED_BF16["bf16"]
    )


def test_on_nvme_each_model_has_a_folder_of_its_own() -> None:
    everything = {
        "offload_optimizer": True,
        "offload_parameters": True,
        "offload_reference": True,
        "offload_reward": True,
    }
    for role in Role:
        section = generated(role, stage=3, nvme_path="/fast", **everything)["zero_optimization"]
        place = {"device": "nvme", "nvme_path": f"/fast/{role}", "pin_memory": True}
        assert section["offload_param"] == place
        assert section.get("offload_optimizer") == (None if role.is_frozen else place)


@pytest.mark.parametrize("own", [0, 3])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_frozen_models_may_have_a_stage_of_their_own(own: int, stage: int) -> None:
    config = zero(stage=stage, reference_stage=own, reward_stage=3 - own)
    assert stage_of(Role.reference, config) == own
    assert stage_of(Role.reward, config) == 3 - own
    section = generated(Role.reference, stage=stage, reference_stage=own)["zero_optimization"]
    assert section == (SHARDED if own else {"stage": 0})
    assert generated(Role.actor, stage=stage, reference_stage=own)["zero_optimization"] == (
        {"stage": 0} if not stage else FAST | (SHARDED if stage == 3 else {"stage": 1})
    )


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


def test_a_critic_at_stage_0_beside_a_sharded_actor_keeps_fp32_weights() -> None:
    stages = {"stage": 3, "critic_stage": 0}
    plain = {"zero_optimization": {"stage": 0}}
    assert generated(Role.critic, Dtype.bf16, **stages) == TRAINED | plain
    assert generated(Role.reward, Dtype.bf16, **stages) == FROZEN | plain
    sharded = {"zero_optimization": SHARDED}
    assert generated(Role.reference, Dtype.bf16, **stages) == FROZEN | sharded | BF16
    sharded = {"zero_optimization": SHARDED | FAST}
    assert generated(Role.actor, Dtype.bf16, **stages) == TRAINED | sharded | TRAINED_BF16


def test_extra_is_merged_last_and_deeply() -> None:
    extra = {
        "zero_optimization": {"reduce_bucket_size": 5, "overlap_comm": False},
        "steps_per_print": 10,
        "hybrid_engine": {"enabled": True, "max_out_tokens": 512},
    }
    assert generated(Role.actor, stage=1, extra=extra) == TRAINED | {
        "zero_optimization": {
            "stage": 1,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": 5,
        },
        "steps_per_print": 10,
        "hybrid_engine": {"enabled": True, "max_out_tokens": 512},
    }
    assert extra == {
        "zero_optimization": {"reduce_bucket_size": 5, "overlap_comm": False},
        "steps_per_print": 10,
        "hybrid_engine": {"enabled": True, "max_out_tokens": 512},
    }


@pytest.mark.parametrize(
    ("stage", "dtype", "expected"),
    [
        (0, Dtype.bf16, False),  # autocast over fp32 weights
        (1, Dtype.bf16, True),
        (3, Dtype.bf16, True),
        (2, Dtype.fp32, False),
    ],
)
def test_which_weights_are_half(stage: int, dtype: Dtype, *, expected: bool) -> None:
    for role in Role:
        assert has_half_weights(role, zero(stage=stage), dtype) is expected
