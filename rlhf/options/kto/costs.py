"""Costs of KTO's reference point: a forward pass of the policy and one of the reference."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig


def added_step_seconds(
    config: RunConfig, phase: Phase, tokens: float, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return the seconds per step of both passes; ``score`` is the reference's other pass."""
    return {"estimate KL": 2 * seconds["score"]} if phase is Phase.dpo else {}
