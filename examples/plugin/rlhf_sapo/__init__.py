"""SAPO: a soft gate in place of PPO's clip, https://arxiv.org/abs/2511.20347 (from memory).

A token whose ratio leaves 1 loses its gradient gradually, sooner if its advantage is negative. It
costs nothing. Importing this file imports no torch: ``gate.py`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.schema.keys import ABOVE_0, AT_LEAST_0, LossLimit, Unread, key, needs
from rlhf.methods import Method, MethodKeys

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig
    from rlhf_sapo.gate import SapoHook

ON = needs("sapo_temperature", fix="add {key}=1.0")
REPLACED = Unread(("ppo.sapo_temperature",), lambda x: x > 0, "use {key}=0")


@dataclass(kw_only=True)
class SapoKeys(MethodKeys):
    """Keys of the group ``ppo`` for SAPO."""

    sapo_temperature: float = key(
        AT_LEAST_0, default=0.0, limit=LossLimit(0.0, "tokens that have moved far count less")
    )
    """SAPO: temperature of the gate of tokens with positive advantage (1.0 in the paper); 0: PPO's
    clip."""
    sapo_negative_temperature: float = key(ABOVE_0, default=1.05, unread=[ON])
    """Temperature of the gate of tokens with negative advantage; higher: the gate closes sooner."""


class Sapo(Method):
    """Replace PPO's clip by a soft gate on the ratio."""

    name = "sapo"
    keys = {"ppo": SapoKeys}
    off = {"ppo.sapo_temperature": 0.0}
    unread = dict.fromkeys(("ppo.cliprange", "ppo.cliprange_high", "ppo.dual_clip"), REPLACED)

    def check(self, config: RunConfig) -> None:
        """Check that no other surrogate was chosen."""
        ppo = config.ppo
        broken = {f"ppo.surrogate={ppo.surrogate}: use ppo.surrogate=clip": ppo.surrogate != "clip"}
        if self.is_on(config):
            refuse_broken_rule(broken, "ppo.sapo_temperature replaces ")

    def hook(self) -> type[SapoHook]:
        """Return the class that replaces the surrogate."""
        from rlhf_sapo.gate import SapoHook

        return SapoHook
