"""Step rewards: score each step of a response, and reward the token at which the step ends.

This is process supervision, https://arxiv.org/abs/2211.14275, https://arxiv.org/abs/2305.20050: the
reward's function is called for each step instead of each response. Use it if a step can be judged
by itself, and responses are long. Do not use it if only the end of a response can be judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Phase, ScaleReward
from rlhf.config.schema.ppo import COMPARING
from rlhf.methods import Method

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig
    from rlhf_lab.step_rewards.step_scores import StepScorer

KEYS = ("function*", "run_code", "pattern*", "columns")


class StepRewards(Method):
    """Score each step of a response, and reward the token at which the step ends."""

    name = "step_rewards"
    reward_kinds = {"steps": ("kind", "weight", "timeout_seconds", "fallback", *KEYS)}

    def check(self, config: RunConfig) -> None:
        """Check that advantages are per token, and that no key needs one score per response."""
        ppo = config.ppo
        if not self.is_on(config) or Phase.ppo not in config.phase.order:
            return
        broken = {
            f"ppo.advantage_estimator={ppo.advantage_estimator}: it compares sums of whole "
            "responses; use gae or reinforce_pp, or kind=function": (
                ppo.advantage_estimator in COMPARING
            ),
            f"ppo.scale_reward={ppo.scale_reward}: rewards per step are not scores of responses; "
            "use none, and rewards.NAME.weight": ppo.scale_reward is not ScaleReward.none,
            f"ppo.missing_end_score={ppo.missing_end_score}: rewards per step are added to this "
            "score; use ppo.missing_end_penalty": ppo.missing_end_score is not None,
            f"environment.kind={config.environment.kind}: the environment's rewards are the "
            "rewards of its turns; use environment=none, or kind=function": (
                config.environment.is_used
            ),
        }
        refuse_broken_rule(broken, "rewards with kind=steps and ")

    def scorer(self) -> StepScorer:
        """Return the scorer of the steps of responses."""
        from rlhf_lab.step_rewards.step_scores import StepScorer

        return StepScorer()
