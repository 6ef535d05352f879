"""Keys of PPO for responses whose log-probabilities differ from those of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from rlhf.config.schema.keys import ABOVE_0, ABOVE_1, FROM_0_BELOW_1, LossLimit, key, needs

RolloutCorrection = StrEnum("RolloutCorrection", "none token sequence geometric")
"""Levels at which a response has importance weights: one per token, or one as a whole."""

CorrectionMode = StrEnum("CorrectionMode", "truncate mask")
"""Treatments of an importance weight beyond its limits: cut it off, or replace it by 0."""

CORRECTED = needs("rollout_correction", "token", "sequence", "geometric")
CAP = LossLimit(math.inf, "large weights are cut off, or become 0")
FLOOR = LossLimit(0.0, "tokens with small weights are masked")
MASK = LossLimit(None, "unlikely responses with negative advantage are masked")


@dataclass(kw_only=True)
class CorrectionKeys:
    """Keys of the group ``ppo`` for importance weights and masks."""

    rollout_correction: RolloutCorrection
    """Weight losses by p_start / p_sampled (policy at the step's start, sampler): per token, or its
    product or geometric mean over the response. Default with vllm_server: token."""
    rollout_correction_mode: CorrectionMode = key(unread=[CORRECTED])
    """Weights beyond the limits are cut off at the cap (truncate), or become 0 (mask)."""
    rollout_correction_cap: float = key(ABOVE_1, unread=[CORRECTED], limit=CAP)
    """Largest weight of rollout_correction."""
    rollout_correction_floor: float = key(
        FROM_0_BELOW_1, unread=[CORRECTED, needs("rollout_correction_mode", "mask")], limit=FLOOR
    )
    """Smallest weight of rollout_correction_mode=mask (IcePop: 0.5); 0: none."""
    rollout_correction_lr: bool = key(unread=[CORRECTED])
    """Multiply the actor's learning rate by sqrt(effective sample size / number of weights), of the
    step's weights before their limits (VCPO)."""
    off_policy_mask_kl: float | None = key(ABOVE_0, limit=MASK)
    """KL(sampler || new) of a response, nats per token, above which its tokens with negative
    advantage are masked (DeepSeek-V3.2); null: none."""

    @property
    def uses_corrections(self) -> bool:
        """Return True if losses are weighed, or tokens masked, by how far the sampler differs."""
        is_weighed = self.rollout_correction is not RolloutCorrection.none
        return is_weighed or self.off_policy_mask_kl is not None
