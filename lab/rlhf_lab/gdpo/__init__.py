"""GDPO: normalise each reward over the responses to a prompt before the rewards are added.

https://arxiv.org/abs/2601.05242. It takes no memory or time. Use it if all rewards should count:
GRPO normalises their sum, so the reward that varies most decides the advantages, and responses with
different rewards can get equal advantages. Do not use it if the rewards' own scales matter: a
reward that hardly varies counts as much as the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import AdvantageEstimator, Phase, ScaleReward
from rlhf.methods import Method, MethodKeys

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig
    from rlhf_lab.gdpo.hooks import GdpoHook


@dataclass(kw_only=True)
class GdpoKeys(MethodKeys):
    """Keys of the group ``ppo`` for GDPO."""

    gdpo: bool = False
    """GDPO: normalise each of rewards over the responses to a prompt, add them by weight, and
    normalise the sums over the rollout; needs advantage_estimator=dr_grpo."""


class Gdpo(Method):
    """Normalise each reward over the responses to a prompt before the rewards are added."""

    name = "gdpo"
    keys = {"ppo": GdpoKeys}
    off = {"ppo.gdpo": False}

    def check(self, config: RunConfig) -> None:
        """Check that several rewards count, and that nothing else scales them or their sum."""
        ppo = config.ppo
        if not self.is_on(config) or Phase.ppo not in config.phase.order:
            return
        counted = [name for name, part in config.rewards.items() if part.weight != 0]
        normalised = [name for name in counted if config.rewards[name].normalise]
        broken = {
            f"ppo.advantage_estimator={ppo.advantage_estimator} scales or weights the normalised "
            "sums again; use ppo.advantage_estimator=dr_grpo, which only subtracts a mean of 0": (
                ppo.advantage_estimator is not AdvantageEstimator.dr_grpo
            ),
            f"{len(counted)} rewards with a weight: GDPO adds several; use 2 or more, or "
            "ppo.gdpo=false with ppo.advantage_estimator=grpo": len(counted) < 2,  # noqa: PLR2004
            f"rewards.{''.join(normalised[:1])}.normalise=true: GDPO normalises the reward again; "
            "remove normalise": bool(normalised),
            f"ppo.scale_reward={ppo.scale_reward}: GDPO has scaled the sums; use "
            "ppo.scale_reward=none": ppo.scale_reward is not ScaleReward.none,
            f"environment.kind={config.environment.kind}: the environment's rewards belong to "
            "turns, not to responses; use environment=none": config.environment.is_used,
        }
        refuse_broken_rule(broken, "ppo.gdpo=true with ")

    def hook(self) -> type[GdpoHook]:
        """Return the class of the hook that combines the rewards."""
        from rlhf_lab.gdpo.hooks import GdpoHook

        return GdpoHook
