"""Warn of doubtful results, from the measurements that the phases of a run have stored.

A rising score can look like success when it is not. These rules detect a reward model that guesses,
responses that collapse, a policy that left its reference or exploits its reward model, and rewards
that said nothing about most responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf.base.finite_numbers import find_non_finite
from rlhf.base.intervals import mean_of
from rlhf.report.run_files import PointsByMetric

CHANCE = 0.5  # accuracy of a reward model that guesses
TOO_GOOD = 0.99  # accuracy that preferences of people do not allow
WIDE = 0.2  # widest 95 % interval of an accuracy without a warning; about 100 pairs have it
LENGTH_FACTOR = 2.0  # largest factor by which the mean length of responses may change
MOST_KL = 0.3  # nats per response token; docs/metrics.md gives the same limit
FEW_ENDED = 0.5  # warn if a smaller share of responses ended by themselves
MOST_FALLBACKS = 0.05  # share of all responses in training
MOST_WITHOUT_SIGNAL = 0.5  # mean share of equal scores, or of groups of equal scores
ROUNDING = 1e-6  # a smaller deviation of scores is rounding; relative to scores above 1
HELD = {"ppo": "ppo.kl_ctl", "dpo": "dpo.beta"}  # the key that holds a policy to its reference
RATE = {"ppo": "ppo.actor_lr", "dpo": "dpo.lr"}
FEWER = {"ppo": "ppo.steps", "dpo": "dpo.epochs"}
NO_INTERVAL = (0.0, 0.0)  # replaces a missing interval; it excludes nothing


def find_doubts(phases: Mapping[str, Mapping[str, Any]], series: PointsByMetric) -> list[str]:
    """Return one line, with a suggestion, for each reason to doubt the results of ``phases``."""
    lines = [f"{name} is not a finite number" for name in find_non_finite(phases)]
    for name in ("reward", "dpo"):
        if name in phases:
            lines += _doubts_of_pairs(name, phases[name])
    for name in ("ppo", "dpo"):
        if name in phases:
            lines += _doubts_of_policy(name, phases[name])
    if "ppo" in phases:
        lines += _doubts_of_rewards(series, has_risen=_lowest_gain(phases["ppo"]) > 0)
    return lines


def _doubts_of_pairs(phase: str, measures: Mapping[str, Any]) -> Iterator[str]:
    low, high = measures["accuracy_ci"]
    is_synthetic = "best_possible_accuracy" in measures
    interval = f"{phase}: the 95 % interval of the held-out accuracy is {low:.3f} to {high:.3f}"
    if low <= CHANCE:
        yield (
            f"{interval} and includes chance ({CHANCE}); later phases learn from noise. Give the "
            f"phase more pairs (data.split), more passes ({phase}.epochs) or another {phase}.lr"
        )
    elif phase == "reward" and measures["accuracy"] >= TOO_GOOD and not is_synthetic:
        yield (
            f"{phase}: the held-out accuracy is {measures['accuracy']:.3f}, and people agree less: "
            "a leak, or length decides. Compare the lengths of chosen and rejected answers"
        )
    elif high - low > WIDE:
        yield f"{interval}; hold out more pairs (data.eval_share) for a narrower interval"


def _doubts_of_policy(phase: str, measures: Mapping[str, Any]) -> Iterator[str]:
    before, after = measures.get("response_tokens_before"), measures.get("response_tokens_after")
    if before and after is not None and not 1 / LENGTH_FACTOR <= after / before <= LENGTH_FACTOR:
        yield (
            f"{phase}: the mean response went from {before:.1f} to {after:.1f} tokens; read "
            "samples.jsonl: the score may depend on length instead of quality"
        )
    ended = measures.get("ended_share_after")
    if ended is not None and ended < FEW_ENDED:
        yield (
            f"{phase}: {ended:.0%} of the responses ended by themselves; raise "
            f"rollout.max_response_tokens{' or ppo.missing_end_penalty' * (phase == 'ppo')}"
        )
    kl = measures.get("kl_to_reference")
    has_mastered = "return_after" in measures and _lowest_gain(measures) > 0  # an environment
    if kl is not None and after and kl / after > MOST_KL and not has_mastered:
        yield (
            f"{phase}: KL to the reference is {kl / after:.2f} nats per response token, above "
            f"{MOST_KL}; raise {HELD[phase]} or lower {RATE[phase]}"
        )
    scorer, cure = "reward model", "train a better reward model"
    if "score_parts_after" in measures:
        scorer, cure = "rewards", "correct the parts of rewards"
    judges = {"gold score": measures.get("gold_gain_ci", NO_INTERVAL)}
    judges |= {f"judge's {name}": gain for name, gain in measures.get("judge_gains", {}).items()}
    for judge, (lowest_gain, highest_gain) in judges.items():
        if _lowest_gain(measures) > 0 > highest_gain:
            yield (
                f"{phase}: the score rose while the {judge} fell (both 95 % intervals exclude 0): "
                f"the policy exploits the {scorer}. Raise {HELD[phase]}, take fewer "
                f"{FEWER[phase]} or {cure}"
            )
        elif judge != "gold score" and _lowest_gain(measures) > 0 > lowest_gain:
            yield (
                f"{phase}: the score rose, and the {judge} did not measurably (95 % interval "
                f"{lowest_gain:+.3f} to {highest_gain:+.3f}); read samples.jsonl"
            )


def _doubts_of_rewards(series: PointsByMetric, *, has_risen: bool) -> Iterator[str]:
    """Yield doubts of rewards that failed, or that were equal.

    Rewards that differed at the first step and became equal while the score rose are the best.
    """
    failed = mean_of([share for _, share in series.get("ppo/fallback_share", ())])
    if failed > MOST_FALLBACKS:
        yield (
            f"ppo: a part of rewards failed for {failed:.0%} of the responses in training, and PPO "
            "learned from its fallback instead; correct the part"
        )
    scores, clipped = (_equal_shares(series, name) for name in ("ppo/score", "ppo/clipped_score"))
    groups = [share for _, share in series.get("ppo/equal_group_share", ())]
    if _lacks_signal(scores, has_risen=has_risen):
        yield (
            f"ppo: in {sum(scores):.0f} of {len(scores)} steps all responses had the same score, "
            "which teaches nothing; choose rewards or prompts that distinguish responses"
        )
    elif _lacks_signal(clipped, has_risen=has_risen):
        yield (
            f"ppo: in {sum(clipped):.0f} of {len(clipped)} steps all scores were equal after "
            "clipping, which teaches nothing; raise ppo.clip_reward_value or lower the weights of "
            "rewards"
        )
    elif _lacks_signal(groups, has_risen=has_risen):
        yield (
            f"ppo: {mean_of(groups):.0%} of the prompts got responses of equal scores, whose "
            "comparison teaches nothing; use easier or harder prompts, more "
            "ppo.responses_per_prompt or a finer score"
        )


def _lacks_signal(equal: Sequence[float], *, has_risen: bool) -> bool:
    """Return True if most of the shares of equal scores, one per step, stand for a lost signal."""
    is_best = has_risen and min(equal[:1], default=1.0) < 1
    return mean_of(equal) > MOST_WITHOUT_SIGNAL and not is_best


def _equal_shares(series: PointsByMetric, name: str) -> list[float]:
    """Return for each step 1 if all responses had the same score ``name``, otherwise 0."""
    means, deviations = (series.get(f"{name}_{each}", ()) for each in ("mean", "std"))
    return [
        float(deviation <= ROUNDING * max(1.0, abs(mean)))
        for (_, mean), (_, deviation) in zip(means, deviations, strict=False)
    ]


def _lowest_gain(measures: Mapping[str, Any]) -> float:
    """Return the lower end of the interval of the score's gain; 0 without an interval."""
    low: float = measures.get("score_gain_ci", NO_INTERVAL)[0]
    return low
