"""Warn of doubtful results, from the measurements that the phases of a run have stored.

A rising score can look like success when it is not. These rules detect a reward model that guesses,
responses that collapse, and a policy that left its reference or exploits its reward model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

CHANCE = 0.5  # accuracy of a reward model that guesses
WIDE = 0.2  # widest 95 % interval of an accuracy without a warning; about 100 pairs have it
LENGTH_FACTOR = 2.0  # largest factor by which the mean length of responses may change
MOST_KL = 0.3  # nats per response token; docs/metrics.md gives the same limit
FEW_ENDED = 0.5  # warn if a smaller share of responses ended by themselves


def find_doubts(phases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one line, with a suggestion, for each reason to doubt the results of ``phases``."""
    lines: list[str] = []
    for name in ("reward", "dpo"):
        if name in phases:
            lines += _doubts_of_pairs(name, phases[name])
    for name in ("ppo", "dpo"):
        if name in phases:
            lines += _doubts_of_policy(name, phases[name])
    return lines


def _doubts_of_pairs(phase: str, measures: Mapping[str, Any]) -> Iterator[str]:
    low, high = measures["accuracy_ci"]
    interval = f"{phase}: the 95 % interval of the held-out accuracy is {low:.3f} to {high:.3f}"
    if low <= CHANCE:
        yield (
            f"{interval} and includes chance ({CHANCE}); later phases learn from noise. Give the "
            f"phase more pairs (data.split), more passes ({phase}.epochs) or another {phase}.lr"
        )
    elif high - low > WIDE:
        yield f"{interval}; hold out more pairs (data.eval_share) for a narrower interval"


def _doubts_of_policy(phase: str, measures: Mapping[str, Any]) -> Iterator[str]:
    before, after = measures.get("response_tokens_before"), measures.get("response_tokens_after")
    if before and after is not None and not 1 / LENGTH_FACTOR <= after / before <= LENGTH_FACTOR:
        yield (
            f"{phase}: the mean response went from {before:.1f} to {after:.1f} tokens; read "
            "samples.jsonl: the reward model may reward length instead of quality"
        )
    ended = measures.get("ended_share_after")
    if ended is not None and ended < FEW_ENDED:
        yield (
            f"{phase}: {ended:.0%} of the responses ended by themselves; raise "
            "rollout.max_response_tokens or ppo.missing_end_penalty"
        )
    kl = measures.get("kl_to_reference")
    if kl is not None and after and kl / after > MOST_KL:
        yield (
            f"{phase}: KL to the reference is {kl / after:.2f} nats per response token, above "
            f"{MOST_KL}; raise ppo.kl_ctl or lower ppo.actor_lr"
        )
    nothing = (0.0, 0.0)  # stands for a missing interval, which raises no alarm
    (lowest, _), (_, highest) = (
        measures.get(f"{name}_gain_ci", nothing) for name in ("score", "gold")
    )
    if lowest > 0 > highest:
        scorer, cure = "reward model", "train a better reward model"
        if "score_parts_after" in measures:
            scorer, cure = "rewards", "correct the parts of rewards"
        yield (
            f"{phase}: the score rose while the gold score fell (both 95 % intervals exclude 0): "
            f"the policy exploits the {scorer}. Raise ppo.kl_ctl, take fewer ppo.steps or {cure}"
        )
