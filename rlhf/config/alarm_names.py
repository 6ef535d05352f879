"""The names of alarms, which alarms.stop, alarms.mute and study.stop_on take."""

from __future__ import annotations

from enum import StrEnum


class AlarmName(StrEnum):
    """Alarms during training (docs/alarms.md)."""

    not_finite = "not_finite"
    reference_mismatch = "reference_mismatch"
    rollout_mismatch = "rollout_mismatch"
    no_change = "no_change"
    kl_runaway = "kl_runaway"
    clipping = "clipping"
    entropy_collapse = "entropy_collapse"
    length = "length"
    few_end = "few_end"
    duplicates = "duplicates"
    critic_useless = "critic_useless"
    critic_explodes = "critic_explodes"
    score_against_gold = "score_against_gold"
    disagreement = "disagreement"
    fallbacks = "fallbacks"
    equal_scores = "equal_scores"
    equal_groups = "equal_groups"
    blind_updates = "blind_updates"
