"""Rules for the models whose weights can be mixed into the reference."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Phase
from rlhf.config.roles import SHARDED_WEIGHTS, Role, stage_of
from rlhf.config.schema.run import RunConfig


def check(config: RunConfig) -> None:
    """Check that every rank holds whole weights of the policy and of the reference."""
    every, zero = config.ppo.reference_every, config.zero
    stages = {each: stage_of(each, zero) for each in (Role.actor, Role.reference)}
    sharded = [role for role, stage in stages.items() if stage == SHARDED_WEIGHTS]
    broken = {
        f"ppo.reference_every={every} with zero.stage={zero.stage}: the weights of the "
        f"{' and the '.join(sharded)} are sharded, and shards are not mixed; use zero=stage2, and "
        "zero.reference_stage=0": every > 0 and bool(sharded) and Phase.ppo in config.phase.order
    }
    refuse_broken_rule(broken)
