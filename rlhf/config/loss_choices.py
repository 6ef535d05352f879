"""Enums of the keys that choose the loss of PPO's actor."""

from __future__ import annotations

from enum import StrEnum


class LossAggregation(StrEnum):
    """Averages of the actor's token losses in a mini-batch; the critic always uses token_mean."""

    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    fixed_length = "fixed_length"


class ValueTargets(StrEnum):
    """Sources of advantages and of the critic's targets."""

    gae = "gae"
    monte_carlo = "monte_carlo"


class SurrogateName(StrEnum):
    """Losses of the actor (docs/algorithms.md)."""

    clip = "clip"
    gspo = "gspo"
    cispo = "cispo"


class RolloutCorrection(StrEnum):
    """Levels of importance weights for responses that another policy sampled."""

    none = "none"
    token = "token"
    sequence = "sequence"
    geometric = "geometric"


class CorrectionMode(StrEnum):
    """What happens to an importance weight beyond its limits: it is cut off, or becomes 0."""

    truncate = "truncate"
    mask = "mask"


class ProximalPolicy(StrEnum):
    """Policies around which the ratio is clipped."""

    step_start = "step_start"
    interpolated = "interpolated"
