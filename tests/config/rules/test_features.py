"""Keys that need, or exclude, one another: each refusal names the key, its value and a way out."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.freeze import to_run_config

Compose = Callable[[list[str]], DictConfig]

RLOO = ["ppo.advantage_estimator=rloo", "ppo.responses_per_prompt=4"]
HALF = ["zero=stage1", "zero.moments=bf16"]
OBSTACLES = [  # what plain torch cannot do
    (["hardware.ranks_per_node=2"], "hardware.nodes*hardware.ranks_per_node=2"),
    (["zero=stage1", "zero.offload_optimizer=true"], "zero.offload_optimizer=true"),
    (["zero=stage3", "zero.offload_parameters=true"], "zero.offload_parameters=true"),
    (["zero=stage3", "zero.offload_reference=true"], "zero.offload_reference=true"),
    (["zero=stage3", "zero.offload_reward=true"], "zero.offload_reward=true"),
    (["+zero.extra.prescale_gradients=true"], "zero.extra={'prescale_gradients': True}"),
    (
        ["zero=stage3", "zero.hpz_partition_size=2", "hardware.ranks_per_node=2"],
        "zero.hpz_partition_size=2",
    ),
]


def refusal(compose: Compose, overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        to_run_config(compose(overrides))
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["ppo.steps=null"], ["ppo.steps and ppo.epochs are both null", "set one"]),
        (
            ["rollout.reuse_logprobs=always", "rollout.backend=hf"],
            ["rollout.reuse_logprobs=always", "rollout.backend=hf", "use rollout.backend=fast"],
        ),
        (["rollout.stop=[a,'']"], ["rollout.stop=['a', '']", "remove the empty text"]),
        (
            ["ppo.advantage_estimator=rloo"],
            ["ppo.advantage_estimator=rloo", "ppo.responses_per_prompt=1", "use 2 or more"],
        ),
        (
            ["ppo.advantage_estimator=grpo"],
            ["ppo.advantage_estimator=grpo", "ppo.responses_per_prompt=1", "use 2 or more"],
        ),
        (
            [*RLOO, "ppo.whiten_rewards=true"],
            ["ppo.whiten_rewards=true", "rloo", "set ppo.whiten_rewards=false"],
        ),
        (
            ["ppo.kl_placement=loss"],
            ["ppo.kl_estimator=k1", "ppo.kl_placement=loss", "use ppo.kl_estimator=k3"],
        ),
        (
            ["ppo.kl_target=6", "ppo.kl_horizon=25"],
            ["ppo.kl_horizon=25", "a fifth of ppo.rollout_batch_size=128", "use 26 or more"],
        ),
        (
            [*RLOO, "ppo.actor_freeze_steps=2"],
            ["ppo.actor_freeze_steps=2", "rloo has no critic", "ppo.advantage_estimator=gae"],
        ),
        (
            ["ppo.advantage_estimator=reinforce_pp", "ppo.actor_freeze_steps=2"],
            ["ppo.actor_freeze_steps=2", "reinforce_pp has no critic"],
        ),
        (
            ["ppo.actor_freeze_steps=80"],
            ["ppo.actor_freeze_steps=80", "ppo.steps=56", "use a number below 56"],
        ),
        (
            ["zero=stage0", "zero.offload_optimizer=true"],
            ["zero.offload_optimizer=true", "zero.stage=1, 2 or 3"],
        ),
        *(
            (
                ["zero=stage2", f"zero.{key}={value}"],
                [f"zero.{key}={value} with zero.stage=2", "use zero.stage=3"],
            )
            for key, value in (
                ("offload_parameters", "true"),
                ("quantize_weights", "true"),
                ("quantize_gradients", "true"),
                ("quantize_frozen_weights", "true"),
                ("hpz_partition_size", "2"),
                ("prefetch_bucket_size", "9"),
                ("max_live_parameters", "9"),
                ("param_persistence_threshold", "0"),
            )
        ),
        *(
            (
                [*stages, f"zero.offload_{role}=true"],
                [f"zero.offload_{role}=true with zero.{role}_stage=0", f"use zero.{role}_stage=3"],
            )
            for role, stages in (
                ("reference", ["zero=stage2"]),
                ("reference", ["zero=stage3", "zero.reference_stage=0"]),
                ("reward", ["zero=stage2"]),
                ("reward", ["zero=stage3", "zero.critic_stage=1"]),
                ("reward", ["zero=stage3", "zero.reward_stage=0"]),
            )
        ),
        (
            ["zero=stage2", "zero.critic_stage=1", "zero.max_live_parameters=9"],
            ["zero.stage=2, zero.critic_stage=1", "use zero.stage=3 or zero.critic_stage=3"],
        ),
        (
            ["zero=stage0", "zero.reduce_bucket_size=9"],
            ["zero.reduce_bucket_size=9", "zero.stage=1, 2 or 3"],
        ),
        (
            ["zero=stage3", "zero.nvme_path=/fast"],
            ["zero.nvme_path=/fast", "nothing is offloaded", "use zero=stage3_nvme"],
        ),
        (
            ["zero=stage2_offload", "zero.nvme_path=/fast"],
            ["zero.nvme_path=/fast with zero.stage=2", "use zero.stage=3"],
        ),
        (
            ["zero=stage3_nvme", "zero.critic_stage=2"],
            ["zero.nvme_path=/local_nvme with zero.critic_stage=2", "use zero.critic_stage=3"],
        ),
        *(
            ([f"+zero.extra.{name}=1"], [f"zero.extra.{name}=1: {key} sets this entry", "use "])
            for name, key in (
                ("zero_optimization.stage", "zero.stage"),
                ("zero_optimization.offload_param.device", "zero.offload_parameters"),
                ("train_micro_batch_size_per_gpu", "PHASE.micro_batch_size"),
                ("fp16.enabled", "hardware.dtype"),
            )
        ),
        *(
            (
                ["zero=stage3", f"zero.{key}=true", *machine],
                [f"zero.{key}=true", f"this run has {ranks} on {device}", "several GPUs"],
            )
            for key in ("quantize_weights", "quantize_gradients")
            for machine, ranks, device in (
                (["hardware=a100_40g"], "1 rank", "cuda"),
                (["hardware.ranks_per_node=2"], "2 ranks", "cpu"),
            )
        ),
        (
            ["zero=stage3", "zero.hpz_partition_size=2"],
            ["zero.hpz_partition_size=2", "does not divide", "hardware.ranks_per_node=1"],
        ),
        *(
            (["zero.engine=torch", *obstacle], ["zero.engine=torch", named, "use zero.engine=auto"])
            for obstacle, named in OBSTACLES
        ),
        *(
            ([*HALF, *obstacle], ["zero.moments=bf16", named, "use zero.moments=fp32"])
            for obstacle, named in OBSTACLES
        ),
        (
            [*HALF, "zero.engine=deepspeed"],
            ["zero.moments=bf16 with zero.engine=deepspeed", "use zero.moments=fp32"],
        ),
        (
            ["zero=stage0", "zero.moments=bf16"],
            ["zero.moments=bf16 with zero.stage=0", "use zero=stage1"],
        ),
        (
            [*HALF, "zero.critic_stage=0"],
            ["zero.moments=bf16 with zero.critic_stage=0", "or zero.moments=fp32"],
        ),
        *(
            ([*HALF, f"{key}=0.995"], [f"{key}=0.995", "zero.moments=bf16", f"use {key}=0.99 or"])
            for key in ("sft.beta2", "reward.beta2", "ppo.beta2", "ppo.critic_beta2")
        ),
        (
            [*HALF, "phase.order=[sft,dpo]", "dpo.beta2=0.999"],
            ["dpo.beta2=0.999", "zero.moments=bf16", "use dpo.beta2=0.99 or less"],
        ),
    ],
)
def test_refused(overrides: list[str], parts: list[str], compose: Compose) -> None:
    message = refusal(compose, overrides)
    assert all(part in message for part in parts), message
    assert "\n" not in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["ppo.steps=null", "ppo.epochs=1"],
        ["ppo.steps=10", "ppo.epochs=0.5", "ppo.actor_freeze_steps=9"],
        RLOO,
        ["ppo.advantage_estimator=reinforce_pp", "ppo.whiten_rewards=true"],
        ["ppo.kl_placement=loss", "ppo.kl_estimator=k3"],
        ["ppo.kl_placement=loss", "ppo.kl_estimator=k2"],
        ["zero=stage1", "zero.offload_optimizer=true"],
        ["zero=stage3", "zero.offload_parameters=true", "zero.offload_reward=true"],
        ["zero=stage2", "zero.critic_stage=3", "zero.offload_reward=true"],
        ["zero=stage0", "zero.reference_stage=3", "zero.offload_reference=true"],
        ["zero.reference_stage=3", "zero.reward_stage=3", "hardware.ranks_per_node=1"],
        ["zero=stage2", "zero.critic_stage=3", "zero.max_live_parameters=9"],
        ["zero=stage1", "zero.reference_stage=3", "zero.param_persistence_threshold=0"],
        ["zero=stage0", "zero.critic_stage=1", "zero.reduce_bucket_size=9"],
        ["zero=stage3_nvme"],
        ["zero=stage3_nvme", "zero.critic_stage=2", "zero.offload_optimizer=false"],
        [
            "zero=auto",
            "zero.offload_optimizer=true",
        ],  # the stage as it stands, until a plan is made
        ["zero=stage3_zeropp", "hardware=8xa100_80g"],
        ["phase.order=[sft]", "ppo.steps=null"],  # PPO does not run
        [*HALF, "zero.engine=torch", "sft.beta2=0.99"],
        [*HALF, "dpo.beta2=0.999"],  # nor does DPO
        ["zero=stage3_offload", "zero.engine=auto"],
    ],
)
def test_allowed(overrides: list[str], compose: Compose) -> None:
    to_run_config(compose(overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["ppo.responses_per_prompt=3"],
            "ppo.rollout_batch_size/ranks=128 is not a multiple of ppo.responses_per_prompt=3",
        ),
        (
            ["ppo.ptx_batch_size=3", "hardware.ranks_per_node=2"],
            "ppo.ptx_batch_size=3 is not a multiple of hardware.nodes*hardware.ranks_per_node=2",
        ),
        (["phase.order=[sft,reward,ppo,dpo]"], "dpo replaces ppo"),
        (["phase=dpo"], "model.init=random: DPO starts from an SFT model"),
    ],
)
def test_arithmetic_and_order_of_new_keys(
    overrides: list[str], message: str, compose: Compose
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        to_run_config(compose(overrides))


@pytest.mark.parametrize(
    ("estimator", "whitens"),
    [("gae", True), ("reinforce_pp", True), ("rloo", False), ("grpo", False)],
)
def test_whitening_follows_the_estimator_unless_it_is_set(
    estimator: str, whitens: bool, compose: Compose
) -> None:
    chosen = [f"ppo.advantage_estimator={estimator}", "ppo.responses_per_prompt=2"]
    assert to_run_config(compose(chosen)).ppo.whitens_advantages is whitens
    given = [*chosen, f"ppo.whiten_advantages={not whitens}"]
    assert to_run_config(compose(given)).ppo.whitens_advantages is not whitens
