"""DeepSpeed's section hybrid_engine, golden, from what is typed on the command line."""

from typing import Any

from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Dtype, Phase
from rlhf.config.freeze import to_run_config
from rlhf.config.roles import Role
from rlhf.engine.deepspeed_config import deepspeed_config
from rlhf.models.model_uses import models_in_phase
from rlhf.options import Backend
from rlhf.options.hybrid_engine.hybrid_actor import actor_deepspeed_sections
from tests.conftest import Compose

HYBRID = ["rollout=hybrid_engine", "hardware=8xa100_80g", "zero=stage3"]
PLAIN = {
    "enabled": True,
    "max_out_tokens": 256 + 32,
    "inference_tp_size": 1,
    "release_inference_cache": False,
    "pin_parameters": True,
    "tp_gather_partition_size": 8,
    "enable_cuda_graph": False,
}


def generated(compose: Compose, role: Role, *overrides: str) -> dict[str, Any]:
    config = to_run_config(compose([*overrides]))
    is_hybrid = config.rollout.backend is Backend.hybrid_engine
    return deepspeed_config(
        role,
        zero=config.zero,
        dtype=Dtype.bf16,
        plan=BatchPlan(per_rank=8, micro=4, accumulation=2),
        max_grad_norm=1.0,
        ranks=8,
        actor_sections=actor_deepspeed_sections(config) if is_hybrid else {},
    )


CHANGES: dict[str, Any] = {
    "max_out_tokens": 1024,
    "inference_tp_size": 4,
    "release_inference_cache": True,
    "pin_parameters": False,
    "tp_gather_partition_size": 4,
}


def test_every_field_reaches_deepspeed(compose: Compose) -> None:
    changed = [f"rollout.hybrid_engine.{key}={value}" for key, value in CHANGES.items()]
    graphs = ["rollout.hybrid_engine.enable_cuda_graph=true", "zero=stage2"]
    for overrides, expected in (
        ([], PLAIN),
        (["rollout.max_prompt_tokens=512"], PLAIN | {"max_out_tokens": 512 + 32}),
        (changed, PLAIN | CHANGES),
        (graphs, PLAIN | {"enable_cuda_graph": True}),
    ):
        found = generated(compose, Role.actor, *HYBRID, *overrides)
        assert found["hybrid_engine"] == expected
    from deepspeed.runtime.config import HybridEngineConfig

    assert HybridEngineConfig().model_dump().keys() == PLAIN.keys()  # and there is no other


def test_only_the_actor_has_it(compose: Compose) -> None:
    for role in Role:
        config = generated(compose, role, *HYBRID)
        assert ("hybrid_engine" in config) == (role is Role.actor)
    assert "hybrid_engine" not in generated(compose, Role.actor)


def test_the_plan_knows_that_only_ppos_actor_needs_deepspeed(compose: Compose) -> None:
    config = to_run_config(compose([*HYBRID, "model=opt_1.3b"]))
    asking = [
        (phase, model.role)
        for phase in config.phase.order
        for model in models_in_phase(config, phase)
        if model.needs_deepspeed
    ]
    assert asking == [(Phase.ppo, Role.actor)]
