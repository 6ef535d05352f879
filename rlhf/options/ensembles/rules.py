"""Rules for the members of the reward model, and the steps in which further members learn."""

from __future__ import annotations

import math

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.batches import examples_per_step
from rlhf.config.choices import Phase
from rlhf.config.roles import SHARDED_WEIGHTS, Role, has_reward_model, stage_of
from rlhf.config.schema.run import RunConfig


def check(config: RunConfig) -> None:
    """Check that a run with several members has a reward model, and does not shard its weights."""
    if config.reward.members == 1:
        return
    best, loss = config.checkpoint.best, config.reward.loss
    stages = {stage_of(role, config.zero) for role in (Role.reward_training, Role.reward)}
    broken = {
        ": this run has no reward model, only rules or a judge; set reward.members=1, or add "
        "rewards.model={kind: model}": not has_reward_model(config),
        f" with checkpoint.best={best}: the further members learn after the first, and no earlier "
        "step has all of them; set checkpoint.best=null": (best or "").startswith("reward/"),
        f" with reward.loss={loss} on single responses: members learn from pairs; set "
        "reward.members=1, or use reward.loss=end": config.reward.unpaired is not None,
        " with sharded weights (ZeRO stage 3): members start from hidden states of the first "
        "member's layers; use zero=stage2, or set reward.members=1": SHARDED_WEIGHTS in stages,
    }
    refuse_broken_rule(broken, f"reward.members={config.reward.members}")


def num_added_steps(config: RunConfig, phase: Phase, *, examples: int) -> int:
    """Return the number of optimizer steps of the further members; 0 unless ``phase`` is reward."""
    if phase is not Phase.reward:
        return 0
    return math.ceil(examples * config.reward.member_epochs / examples_per_step(config, phase))
