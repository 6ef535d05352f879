"""Settings of AdamW and its schedule; ppo.critic_* keys replace the common keys for the critic."""

from __future__ import annotations

from dataclasses import fields

from rlhf.base.errors import ConfigError
from rlhf.config.batches import rollout_plan
from rlhf.config.choices import LoraRole
from rlhf.config.roles import Role, adapter_lr
from rlhf.config.schema.ppo import PpoConfig
from rlhf.config.schema.run import RunConfig
from rlhf.config.schema.supervised import OptimizerConfig
from rlhf.engine.settings import OptimizerSettings


def ppo_optimizer_settings(config: RunConfig, role: Role) -> OptimizerSettings:
    """Return AdamW settings of actor or critic, with a schedule over all its optimizer steps."""
    ppo, is_actor = config.ppo, role is Role.actor
    if ppo.steps is None:
        raise ConfigError(
            "ppo.steps=null: learning-rate schedules need the number of steps; set ppo.steps, or "
            "start the run with launch.py, which computes ppo.steps from ppo.epochs"
        )
    steps = ppo.steps - (ppo.actor_freeze_steps if is_actor else 0)
    return OptimizerSettings.from_config(
        _optimizer_config(ppo, role),
        total_steps=steps * ppo.ppo_epochs * rollout_plan(config).mini_batches,
        adapter_lr=adapter_lr(config.lora, LoraRole.actor if is_actor else LoraRole.critic),
        ema_beta=ppo.ema_beta if is_actor else 0.0,
    )


def _optimizer_config(ppo: PpoConfig, role: Role) -> OptimizerConfig:
    """Return the optimizer options of ``role``; for the critic, critic_* keys take precedence."""
    names = [field.name for field in fields(OptimizerConfig) if field.name != "lr"]
    values = {name: getattr(ppo, name) for name in names}
    if role is Role.critic:
        own = {name: getattr(ppo, f"critic_{name}", None) for name in names}
        values |= {name: value for name, value in own.items() if value is not None}
    return OptimizerConfig(lr=ppo.actor_lr if role is Role.actor else ppo.critic_lr, **values)
