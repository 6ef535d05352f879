"""Costs of adapters, and the memory that they save."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.options.lora.keys import LoraRole
from rlhf.plan.savings import Saving

if TYPE_CHECKING:
    from rlhf.models.model_uses import ModelUse

LORA_ROLES = {  # each trained model's name in lora.roles
    Role.sft: LoraRole.sft,
    Role.reward_training: LoraRole.reward,
    Role.actor: LoraRole.actor,
    Role.critic: LoraRole.critic,
}

RANK = 16  # lora.rank of the presets lora=default and lora=all
TRAINED_ROLES = {  # the models that each phase trains
    Phase.sft: [LoraRole.sft],
    Phase.reward: [LoraRole.reward],
    Phase.dpo: [LoraRole.actor],
    Phase.ppo: [LoraRole.actor, LoraRole.critic],
}


def with_adapters(config: RunConfig, model: ModelUse) -> ModelUse:
    """Return ``model`` with its adapters; without lora.train_rest it is its own reference."""
    lora, shape = config.lora, model.shape
    role = LORA_ROLES.get(model.role)
    if role not in lora.roles:
        return model
    critic_rank = lora.critic_rank if role is LoraRole.critic else None
    adapters = shape.adapter_weights(critic_rank or lora.rank)
    other_weights = model.weights - shape.linear_layer_weights if lora.train_rest else 0
    head = shape.embedding if model.is_scorer and not lora.train_rest else 0
    return replace(
        model,
        trained=adapters + other_weights + head,
        extra_weights=adapters,
        is_own_reference=not lora.train_rest,
    )


def propose_adapters(config: RunConfig) -> Iterator[Saving]:
    """Yield the change that adds adapters to all trained models, unless they have adapters."""
    lora = config.lora
    trained_roles = {role for phase in config.phase.order for role in TRAINED_ROLES[phase]}
    if trained_roles <= set(lora.roles if lora.rank else ()):
        return
    words, roles = f"lora.roles=[{','.join(LoraRole)}]", list(LoraRole)
    if not lora.rank or (lora.rank == RANK and lora.roles == TRAINED_ROLES[Phase.ppo]):
        words = "lora=all"
        if not {Phase.sft, Phase.reward} & set(config.phase.order):
            words, roles = "lora=default", TRAINED_ROLES[Phase.ppo]
    adapted = replace(lora, rank=lora.rank or RANK, roles=roles)
    yield Saving(words, replace(config, lora=adapted), is_exact=False)


def idle_key_notes(config: RunConfig) -> Iterator[str]:
    """Yield a sentence if no trained model has frozen weights that could be quantized."""
    roles = config.lora.roles
    trained = {role for phase in config.phase.order for role in TRAINED_ROLES[phase]}
    if config.zero.quantize_frozen_weights and not trained & set(roles):
        yield (
            f"zero.quantize_frozen_weights=true has no effect: lora.roles=[{','.join(roles)}] "
            "names no model that is trained here, so no trained model has frozen weights"
        )


def cost_warnings(config: RunConfig, phases: Collection[Phase]) -> Iterator[str]:
    """Yield a sentence if the phases before PPO train all weights."""
    roles = config.lora.roles
    early_phases = [phase for phase in (Phase.sft, Phase.reward) if phase in phases]
    if early_phases and not {*early_phases} & {*roles}:
        text = f"{' and '.join(early_phases)} train all weights; lora=all trains adapters instead"
        yield f"lora.roles=[{','.join(roles)}]: {text}"
