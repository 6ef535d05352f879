"""Rules for the rewards and the estimator with which GDPO makes sense."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import AdvantageEstimator, Phase, ScaleReward
from rlhf.config.schema.run import RunConfig


def check(config: RunConfig) -> None:
    """Check that several rewards count, and that nothing else scales them or their sum."""
    ppo = config.ppo
    if not ppo.gdpo or Phase.ppo not in config.phase.order:
        return
    counted = [name for name, part in config.rewards.items() if part.weight != 0]
    normalised = [name for name in counted if config.rewards[name].normalise]
    broken = {
        f"ppo.advantage_estimator={ppo.advantage_estimator} scales or weighs the normalised sums "
        "again; use ppo.advantage_estimator=dr_grpo, which only subtracts a mean of 0": (
            ppo.advantage_estimator is not AdvantageEstimator.dr_grpo
        ),
        f"{len(counted)} rewards with a weight: there is no sum of rewards; use 2 or more, or "
        "ppo.gdpo=false with ppo.advantage_estimator=grpo": len(counted) < 2,  # noqa: PLR2004
        f"rewards.{''.join(normalised[:1])}.normalise=true: GDPO normalises the reward again; "
        "remove normalise": bool(normalised),
        f"ppo.scale_reward={ppo.scale_reward}: GDPO has scaled the sums; use "
        "ppo.scale_reward=none": ppo.scale_reward is not ScaleReward.none,
        f"environment.kind={config.environment.kind}: the environment's rewards belong to turns, "
        "not to responses; use environment=none": config.environment.is_used,
    }
    refuse_broken_rule(broken, "ppo.gdpo=true with ")
