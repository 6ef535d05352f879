"""Store in result.json which parts of the score are biases, and from which PPO step on."""

from __future__ import annotations

from typing import Any

from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.phases.shared.policy_evaluation import HeldOutPrompts
from rlhf_lab.biases import BiasKeys, find_biases


class BiasHook(PpoHook):
    """A hook that adds the onsets of the biases to the results."""

    def results(self, _: RLHFEngine, __: HeldOutPrompts, when: str) -> dict[str, Any]:
        """Return the onset of each bias by name, once: with the results after training."""
        onsets = {name: BiasKeys.of(part).onset for name, part in find_biases(self.config).items()}
        return {"bias_onsets": onsets} if when == "after" else {}
