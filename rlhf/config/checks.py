"""Rules that a configuration as a whole must keep, and all arithmetic of batch sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rlhf.config.choices import Device, ModelInit, Phase, Source
from rlhf.config.data_checks import check_data
from rlhf.config.feature_checks import (
    check_engine,
    check_lora,
    check_ppo,
    check_rollout,
    check_zero,
)
from rlhf.config.launch_checks import check_launcher
from rlhf.config.machine_schema import HardwareConfig
from rlhf.config.ranges import check_ranges
from rlhf.config.schema import ModelConfig, RunConfig
from rlhf.errors import ConfigError

RANKS = "hardware.nodes*hardware.ranks_per_node"
RESPONSE_TOKENS = "rollout.max_prompt_tokens + rollout.max_response_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How one optimiser step is divided. Counted are sequences; pairs in the reward phase."""

    per_rank: int
    """What one rank contributes to a step."""
    micro: int
    """What it runs at once."""
    accumulation: int
    """Micro batches of one rank in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """How one rollout of PPO is divided."""

    per_rank: int
    """Responses that one rank samples."""
    prompts_per_rank: int
    """Prompts that they answer."""
    mini_batches: int
    """Optimiser steps in one pass over the rollout."""


def num_ranks(config: RunConfig) -> int:
    """Processes of the whole run."""
    return config.hardware.nodes * config.hardware.ranks_per_node


def exact_div(total: int, part: int, *, total_key: str, part_key: str) -> int:
    """``total / part``, which must be whole: the error names the nearest values that work."""
    if total % part == 0:
        return total // part
    lower = total - total % part
    totals = [lower, lower + part] if lower else [part]
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    parts = [*[d for d in divisors if d < part][-1:], *[d for d in divisors if d > part][:1]]
    raise ConfigError(
        f"{total_key}={total} is not a multiple of {part_key}={part}: "
        f"use {total_key}={' or '.join(map(str, totals))}, "
        f"or {part_key}={' or '.join(map(str, parts))}"
    )


def batch_plan(
    batch_size: int, *, key: str, ranks: int, micro_batch_size: int | None, cap: int
) -> BatchPlan:
    """Divide ``batch_size``, the value of ``key``, over the ranks.

    Without a micro_batch_size it is the largest that divides a rank's part and is at most ``cap``.
    """
    per_rank = exact_div(batch_size, ranks, total_key=key, part_key=RANKS)
    if micro_batch_size is None:
        micro = max(size for size in range(1, min(cap, per_rank) + 1) if per_rank % size == 0)
        return BatchPlan(per_rank=per_rank, micro=micro, accumulation=per_rank // micro)
    accumulation = exact_div(
        per_rank,
        micro_batch_size,
        total_key=f"{key}/ranks",
        part_key=f"{key.partition('.')[0]}.micro_batch_size",
    )
    return BatchPlan(per_rank=per_rank, micro=micro_batch_size, accumulation=accumulation)


def phase_plans(config: RunConfig) -> dict[Phase, BatchPlan]:
    """The batches of every phase that runs."""
    cap = config.hardware.max_micro_batch_size
    pair_cap = max(1, cap // 2)  # a pair is two sequences
    sft, reward, ppo, dpo = config.sft, config.reward, config.ppo, config.dpo
    settings = {
        Phase.sft: ("sft.batch_size", sft.batch_size, sft.micro_batch_size, cap),
        Phase.reward: ("reward.batch_size", reward.batch_size, reward.micro_batch_size, pair_cap),
        Phase.dpo: ("dpo.batch_size", dpo.batch_size, dpo.micro_batch_size, pair_cap),
        Phase.ppo: ("ppo.mini_batch_size", ppo.mini_batch_size, ppo.micro_batch_size, cap),
    }
    ranks = num_ranks(config)
    plans = {}
    for phase in config.phase.order:
        key, size, micro, phase_cap = settings[phase]
        plans[phase] = batch_plan(size, key=key, ranks=ranks, micro_batch_size=micro, cap=phase_cap)
    return plans


def rollout_plan(config: RunConfig) -> RolloutPlan:
    """The division of every rollout of PPO."""
    key, size = "ppo.rollout_batch_size", config.ppo.rollout_batch_size
    per_rank = exact_div(size, num_ranks(config), total_key=key, part_key=RANKS)
    return RolloutPlan(
        per_rank=per_rank,
        prompts_per_rank=exact_div(
            per_rank,
            config.ppo.responses_per_prompt,
            total_key=f"{key}/ranks",
            part_key="ppo.responses_per_prompt",
        ),
        mini_batches=exact_div(
            size,
            config.ppo.mini_batch_size,
            total_key=key,
            part_key="ppo.mini_batch_size",
        ),
    )


def ptx_plan(config: RunConfig) -> BatchPlan:
    """The corpus blocks of every optimiser step of PPO's actor."""
    ppo = config.ppo
    return batch_plan(
        ppo.ptx_batch_size or ppo.mini_batch_size,
        key="ppo.ptx_batch_size" if ppo.ptx_batch_size else "ppo.mini_batch_size",
        ranks=num_ranks(config),
        micro_batch_size=None,
        cap=ppo.micro_batch_size or config.hardware.max_micro_batch_size,
    )


def validate(config: RunConfig) -> None:
    """Refuse a configuration that breaks a rule, with the way out."""
    check_ranges(config)
    check_name(config.name)
    check_order(config.phase.order)
    check_models(config)
    check_lengths(config)
    check_data(config)
    check_hardware(config.hardware)
    check_launcher(config)
    check_zero(config)
    check_engine(config)
    check_lora(config)
    phase_plans(config)
    if Phase.ppo in config.phase.order:
        check_ppo(config.ppo, lora_rank=config.lora.rank)
        check_rollout(config)
        rollout_plan(config)
        ptx_plan(config)


def check_hardware(hardware: HardwareConfig) -> None:
    """Only a CPU's rates can be left to be measured: the GPUs of a plan need not be here."""
    for key in ("peak_tflops", "fp32_tflops", "memory_bandwidth_gb"):
        if hardware.device is Device.cuda and getattr(hardware, key) is None:
            raise ConfigError(
                f"hardware.{key}=null: only rates of a CPU are measured; give the GPU's figure, "
                "see conf/hardware/template.yaml"
            )


def check_name(name: str) -> None:
    """The name is that of one folder, and not that of the link beside it."""
    if Path(name).name != name or name in {"", "..", "latest"}:
        raise ConfigError(
            f"name={name}: it must be the name of a folder in runs/, without slashes and not latest"
        )


def check_order(order: list[Phase]) -> None:
    """Some phases, each once, in InstructGPT's order; DPO takes PPO's place, not both."""
    if Phase.ppo in order and Phase.dpo in order:
        raise ConfigError(
            f"phase.order=[{','.join(order)}]: dpo takes the place of ppo; leave one of them out"
        )
    if not order or order != [phase for phase in Phase if phase in order]:
        raise ConfigError(
            f"phase.order=[{','.join(order)}]: it must hold one phase or more, each once, "
            f"in the order {', '.join(Phase)}"
        )


def check_models(config: RunConfig) -> None:
    """Every model that a phase needs can be made or loaded, and is what the phase starts from."""
    order, model, reward_model = config.phase.order, config.model, config.reward_model
    if model.init.is_of_sft:
        raise ConfigError(
            f"model.init={model.init}: only reward_model.init can be that; "
            "use model.init=pretrained or model.init=random"
        )
    for phase in (Phase.ppo, Phase.dpo):
        if phase in order and Phase.sft not in order and model.init is not ModelInit.pretrained:
            raise ConfigError(
                f"model.init={model.init}: {phase.upper()} starts from an SFT model; "
                "add model.init=pretrained model.path=FOLDER, or run the sft phase too"
            )
    if reward_model.init is ModelInit.gold:
        check_gold(config)
    elif (
        Phase.ppo in order
        and Phase.reward not in order
        and reward_model.init is not ModelInit.pretrained
    ):
        raise ConfigError(
            f"reward_model.init={reward_model.init}: PPO needs a trained reward model; "
            "add reward_model.init=pretrained reward_model.path=FOLDER, run the reward phase too, "
            "or use model@reward_model=gold, the judge of data=synthetic"
        )
    for phase in order:
        for key, used in _models(config, phase):
            check_model(key, used)


def check_gold(config: RunConfig) -> None:
    """The judge can score what the run asks it to."""
    if config.data.source is not Source.synthetic:
        raise ConfigError(
            f"reward_model.init=gold with data.source={config.data.source}: the judge knows the "
            "prompts of the generated task only; use data=synthetic, or train a reward model with "
            "model@reward_model=sft_model"
        )
    if Phase.reward in config.phase.order:
        raise ConfigError(
            "reward_model.init=gold with the reward phase: a judge is not trained; use "
            "phase=pipeline_rule (SFT, then PPO), or phase=ppo with model.path=FOLDER"
        )


def check_model(key: str, model: ModelConfig) -> None:
    """One model can be made or loaded."""
    if model.init is ModelInit.pretrained and not model.path:
        raise ConfigError(
            f"{key}.path={'null' if model.path is None else ''}: {key}.init=pretrained loads it; "
            f"add {key}.path=FOLDER_OR_HUB_ID, or {key}.init=random to train from scratch"
        )
    if model.init is ModelInit.random and "model_type" not in model.architecture:
        raise ConfigError(
            f"{key}.architecture has no model_type: {key}.init=random makes the model from it; "
            f"choose an option of the group {key} that has one, see python launch.py --help"
        )
    if model.init is ModelInit.random and not model.tokenizer and not model.vocab_size:
        raise ConfigError(
            f"{key}.vocab_size=0: a tokenizer is trained with it; "
            f"use a number above 0, or {key}.tokenizer=FOLDER_OR_HUB_ID"
        )


def check_lengths(config: RunConfig) -> None:
    """No sequence is longer than a model that this run makes; of others the length is unknown."""
    rollout = config.rollout
    tokens = {
        Phase.dpo: ("dpo.max_tokens", config.dpo.max_tokens),
        Phase.sft: ("sft.max_tokens", config.sft.max_tokens),
        Phase.reward: ("reward.max_tokens", config.reward.max_tokens),
        Phase.ppo: (RESPONSE_TOKENS, rollout.max_prompt_tokens + rollout.max_response_tokens),
    }
    for phase in config.phase.order:
        name, wanted = tokens[phase]
        for key, model in _models(config, phase):
            limit = model.architecture.get("max_position_embeddings", math.inf)
            if model.init is ModelInit.random and wanted > limit:
                raise ConfigError(
                    f"{name}={wanted}: the model has {limit} positions "
                    f"({key}.architecture.max_position_embeddings); use {limit} or less, "
                    "or a model with more"
                )


def _models(config: RunConfig, phase: Phase) -> list[tuple[str, ModelConfig]]:
    """Key and value of the models whose weights ``phase`` starts from."""
    model = ("model", config.model)
    from_model = config.reward_model.init.is_of_sft
    reward_model = model if from_model else ("reward_model", config.reward_model)
    return {
        Phase.sft: [model],
        Phase.dpo: [model],
        Phase.reward: [reward_model],
        Phase.ppo: [model, reward_model],
    }[phase]
