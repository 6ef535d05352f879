"""What the Hybrid Engine cannot be combined with: each refusal names key, value and a way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.freeze import to_run_config

Compose = Callable[[list[str]], DictConfig]

HYBRID = ["rollout=hybrid_engine", "hardware=8xa100_80g"]
ENGINE = "rollout.hybrid_engine"
OFFLOAD = ["zero=stage2", "zero.offload_optimizer=true"]
SHARED = ["zero=stage3", f"{ENGINE}.inference_tp_size=2"]
GRAPHS = f"{ENGINE}.enable_cuda_graph=true"
TRUNK = ["ppo.shared_trunk=true", "ppo.num_layers_unfrozen=1"]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [*OFFLOAD, "zero.critic_stage=3"],
        SHARED,
        [GRAPHS, "zero=stage2"],
        [f"{ENGINE}.max_out_tokens=288"],  # 256 + 32
        ["lora=default", "lora.roles=[critic]"],
        ["rollout.stop=[x]", "rollout.min_response_tokens=2"],
    ],
)
def test_what_goes_together_is_admitted(overrides: list[str], compose: Compose) -> None:
    to_run_config(compose([*HYBRID, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["hardware=cpu"], ["hardware.device=cpu", "rollout=fast", "GPU profile"]),
        (
            ["zero.engine=torch", "hardware=a6000_48g"],
            ["zero.engine=torch", "zero.engine=auto"],
        ),
        (
            ["zero.moments=bf16", "zero=stage1", "hardware=a6000_48g"],
            ["zero.moments=bf16", "zero.moments=fp32"],
        ),
        (OFFLOAD, ["zero.offload_optimizer=true", "stage 2 of both", "zero.critic_stage=3"]),
        (TRUNK, ["ppo.shared_trunk=true", "ppo.shared_trunk=false"]),
        (
            [f"{ENGINE}.inference_tp_size=2", "zero=stage2"],
            [f"{ENGINE}.inference_tp_size=2", "zero.stage=2", "zero.stage=3 only"],
        ),
        (
            ["zero=stage3", f"{ENGINE}.inference_tp_size=3"],
            [f"{ENGINE}.inference_tp_size=3", "hardware.ranks_per_node=8"],
        ),
        (
            [GRAPHS, "zero=stage3"],
            [GRAPHS, "with zero.stage=3", f"{ENGINE}.enable_cuda_graph=false"],
        ),
        (
            [GRAPHS, f"{ENGINE}.release_inference_cache=true"],
            [GRAPHS, f"with {ENGINE}.release_inference_cache=true"],
        ),
        (
            [f"{ENGINE}.max_out_tokens=287"],
            [f"{ENGINE}.max_out_tokens=287", "max_response_tokens=288", "use null"],
        ),
        (
            ["rollout.reuse_logprobs=always"],
            ["rollout.reuse_logprobs=always", "rollout.backend=hybrid_engine", "backend=fast"],
        ),
    ],
)
def test_what_does_not_is_refused(overrides: list[str], parts: list[str], compose: Compose) -> None:
    with pytest.raises(ConfigError) as caught:
        to_run_config(compose([*HYBRID, *overrides]))
    for part in parts:
        assert part in str(caught.value)
