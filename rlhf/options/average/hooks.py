"""The hook that evaluates and saves the moving average of the actor's weights."""

from __future__ import annotations

from rlhf.phases.ppo.hooks import ActorVariant, PpoHook
from rlhf.phases.ppo.rlhf_engine import RLHFEngine


class AverageHook(PpoHook):
    """A hook that lets the phase evaluate and save the moving average of the actor's weights."""

    def actor_variants(self, engine: RLHFEngine) -> list[ActorVariant]:
        """Return the moving average as the only variant."""
        description = "The moving average of a language model during PPO."
        average = engine.actor.follower
        assert average is not None, "ppo.ema_beta is above 0"
        return [ActorVariant("ema", description, average.swap_in)]
