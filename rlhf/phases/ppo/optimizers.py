"""Optimizer settings of actor and critic: AdamW and its schedule; critic_* keys override."""

from __future__ import annotations

from typing import TypeVar

from rlhf.algorithms.schedule import lr_schedule
from rlhf.config.batches import rollout_plan
from rlhf.config.choices import LoraRole
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.engine.settings import OptimizerSettings
from rlhf.errors import ConfigError
from rlhf.phases.shared.adapters import adapter_lr


def ppo_optimizer(config: RunConfig, role: Role) -> OptimizerSettings:
    """Return AdamW settings of actor or critic, with a schedule over all their optimizer steps.

    Raises:
        ConfigError: if the number of steps is unknown.
    """
    ppo = config.ppo
    if ppo.steps is None:
        raise ConfigError(
            "ppo.steps is null: schedules need the number of steps; launch.py counts them from "
            "ppo.epochs, elsewhere set ppo.steps"
        )
    updates = ppo.ppo_epochs * rollout_plan(config).mini_batches
    if role is Role.critic:
        return OptimizerSettings(
            lr=ppo.critic_lr,
            betas=(_or(ppo.critic_beta1, ppo.beta1), _or(ppo.critic_beta2, ppo.beta2)),
            eps=ppo.adam_eps,
            weight_decay=_or(ppo.critic_weight_decay, ppo.weight_decay),
            max_grad_norm=ppo.max_grad_norm,
            adapter_lr=adapter_lr(config.lora, LoraRole.critic),
            schedule=lr_schedule(
                (ppo.critic_lr_schedule or ppo.lr_schedule).value,
                warmup_steps=_or(ppo.critic_warmup_steps, ppo.warmup_steps),
                total_steps=ppo.steps * updates,
                min_ratio=_or(ppo.critic_min_lr_ratio, ppo.min_lr_ratio),
            ),
        )
    return OptimizerSettings(
        lr=ppo.actor_lr,
        betas=(ppo.beta1, ppo.beta2),
        eps=ppo.adam_eps,
        weight_decay=ppo.weight_decay,
        max_grad_norm=ppo.max_grad_norm,
        adapter_lr=adapter_lr(config.lora, LoraRole.actor),
        ema_beta=ppo.ema_beta,
        schedule=lr_schedule(
            ppo.lr_schedule.value,
            warmup_steps=ppo.warmup_steps,
            total_steps=(ppo.steps - ppo.actor_freeze_steps) * updates,
            min_ratio=ppo.min_lr_ratio,
        ),
    )


Number = TypeVar("Number", int, float)


def _or(own: Number | None, shared: Number) -> Number:
    return shared if own is None else own
