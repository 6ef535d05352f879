"""Rules for what excludes rewards of steps."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Phase, RewardKind, ScaleReward
from rlhf.config.schema.ppo import COMPARING
from rlhf.config.schema.run import RunConfig


def check(config: RunConfig) -> None:
    """Check that advantages belong to tokens, and that nothing takes a response as one step."""
    ppo, kinds = config.ppo, {part.kind for part in config.rewards.values()}
    if RewardKind.steps not in kinds or Phase.ppo not in config.phase.order:
        return
    broken = {
        f"ppo.advantage_estimator={ppo.advantage_estimator}: it compares sums of whole responses; "
        "use gae or reinforce_pp, or kind=function": ppo.advantage_estimator in COMPARING,
        f"ppo.scale_reward={ppo.scale_reward}: rewards of steps are not scores of responses; use "
        "none, and rewards.NAME.weight": ppo.scale_reward is not ScaleReward.none,
        f"ppo.missing_end_score={ppo.missing_end_score}: rewards of steps stay beside this score; "
        "use ppo.missing_end_penalty": ppo.missing_end_score is not None,
        f"environment.kind={config.environment.kind}: the environment's rewards are the rewards of "
        "its turns; use environment=none, or kind=function": config.environment.is_used,
    }
    refuse_broken_rule(broken, "rewards with kind=steps and ")
