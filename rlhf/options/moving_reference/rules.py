"""Rules for the penalty, and for the models whose weights can be mixed into the reference."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Phase
from rlhf.config.roles import SHARDED_WEIGHTS, Role, stage_of
from rlhf.config.schema.run import RunConfig


def check(config: RunConfig) -> None:
    """Check that the reference has an effect, and that every rank has whole weights to mix."""
    ppo, zero, every = config.ppo, config.zero, config.ppo.reference_every
    is_used = every > 0 and Phase.ppo in config.phase.order
    stages = {each: stage_of(each, zero) for each in (Role.actor, Role.reference)}
    sharded = [role for role, stage in stages.items() if stage == SHARDED_WEIGHTS]
    broken = {
        f"ppo.reference_every={every} with zero.stage={zero.stage}: the weights of the "
        f"{' and the '.join(sharded)} are sharded, and shards are not mixed; use zero=stage2, and "
        "zero.reference_stage=0": is_used and bool(sharded),
        f"ppo.reference_every={every} with ppo.kl_ctl={ppo.kl_ctl:g}: nothing pulls the policy "
        "towards the reference; use ppo.kl_ctl=0.1, or ppo.reference_every=0": (
            is_used and ppo.kl_ctl == 0 and not ppo.teacher_setting
        ),
    }
    refuse_broken_rule(broken)
