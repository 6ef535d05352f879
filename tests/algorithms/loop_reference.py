"""PPO's pieces once more: slow, plain Python, one token after another, to compare against.

A row is the list of one response's tokens; rows differ in length, so there is neither padding nor
a mask. Written from the papers (https://arxiv.org/abs/2203.02155 for the rewards,
https://arxiv.org/abs/1506.02438 for the advantages, https://arxiv.org/abs/1707.06347 for the
policy loss, https://arxiv.org/abs/1909.08593 for whitening and the KL controller, and those that
stand beside the rest) and from the loops of DeepSpeed-Chat, not from ``rlhf.algorithms``.
"""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

Row = list[float]
Rows = list[Row]


class Loss(NamedTuple):
    """A loss and its companions, all over the tokens of all rows."""

    total: float
    mean: float
    clipfrac: float
    approx_kl: float = 0.0
    ratio_max: float = 0.0
    dual_clipfrac: float = 0.0
    ratio_mean: float = 0.0


def log_softmax(logits: Row, temperature: float) -> Row:
    """Log-probabilities of a softmax at ``temperature``."""
    scaled = [logit / temperature for logit in logits]
    log_total = math.log(math.fsum(math.exp(x) for x in scaled))
    return [x - log_total for x in scaled]


def clip(x: float, low: float, high: float) -> float:
    """``x`` held in [low, high]."""
    if x < low:
        return low
    if x > high:
        return high
    return x


def clip_scores(scores: Row, ended: list[bool], *, limit: float, penalty: float) -> Row:
    """Clipped scores, less a penalty where there is no end."""
    pairs = zip(scores, ended, strict=True)
    return [clip(score, -limit, limit) - penalty * (not has_end) for score, has_end in pairs]


def rewards_to_go(rewards: Rows, *, gamma: float) -> Rows:
    """sum over l of gamma^l * r_{t + l}, as it stands (https://arxiv.org/abs/2501.03262)."""
    result = []
    for row in rewards:
        result.append(
            [
                math.fsum(gamma**later * r for later, r in enumerate(row[t:]))
                for t in range(len(row))
            ]
        )
    return result


def group_advantages(
    rewards: Rows, *, group_size: int, leaves_one_out: bool, divides: bool = True
) -> Rows:
    """RLOO (https://arxiv.org/abs/2402.14740), or GRPO (https://arxiv.org/abs/2402.03300).

    If nothing ``divides``, the latter is Dr. GRPO's (https://arxiv.org/abs/2503.20783).
    """
    totals = [math.fsum(row) for row in rewards]
    result = []
    for i, row in enumerate(rewards):
        first = i - i % group_size
        group = totals[first : first + group_size]
        if leaves_one_out:
            others = [total for j, total in enumerate(group) if j != i - first]
            advantage = totals[i] - math.fsum(others) / len(others)
        else:
            advantage = totals[i] - statistics.mean(group)
            advantage /= statistics.stdev(group) + 1e-6 if divides else 1
        result.append([advantage] * len(row))
    return result


def kl_per_token(
    logprobs: Rows, reference: Rows, estimator: str, *, sampled: Rows | None = None
) -> Rows:
    """Schulman's three estimators, from r = q(x) / p(x) with x sampled from p.

    k3_ratio is k3 with the weight p(x) / sampled(x), https://arxiv.org/abs/2512.02556 section 3.1.
    """
    formulas: dict[str, Callable[[float], float]] = {
        "k1": lambda r: -math.log(r),
        "k2": lambda r: math.log(r) ** 2 / 2,
        "k3": lambda r: (r - 1) - math.log(r),
    }
    formula = formulas[estimator.removesuffix("_ratio")]
    samplers = sampled if sampled and estimator == "k3_ratio" else logprobs
    result = []
    for rows in zip(logprobs, reference, samplers, strict=True):
        result.append(
            [math.exp(p - s) * formula(math.exp(q - p)) for p, q, s in zip(*rows, strict=True)]
        )
    return result


def token_rewards(kl: Rows, scores: Row, *, kl_ctl: float) -> Rows:
    """DeepSpeed-Chat's compute_rewards: the price of KL, and the score on the last token."""
    rewards = []
    for row, score in zip(kl, scores, strict=True):
        rewards.append([-kl_ctl * x for x in row])
        rewards[-1][-1] += score
    return rewards


def gae(rewards: Rows, values: Rows, *, gamma: float, lam: float) -> tuple[Rows, Rows]:
    """DeepSpeed-Chat's get_advantages_and_returns, one row at a time."""
    all_advantages, all_returns = [], []
    for r, v in zip(rewards, values, strict=True):
        last, backwards = 0.0, []
        for t in reversed(range(len(r))):
            next_value = v[t + 1] if t < len(r) - 1 else 0.0
            delta = r[t] + gamma * next_value - v[t]
            last = delta + gamma * lam * last
            backwards.append(last)
        advantages = backwards[::-1]
        all_advantages.append(advantages)
        all_returns.append([a + x for a, x in zip(advantages, v, strict=True)])
    return all_advantages, all_returns


def whiten(rows: Rows, *, shift_mean: bool) -> Rows:
    """lm-human-preferences' whiten, with the population variance over all tokens."""
    tokens = [x for row in rows for x in row]
    mean = math.fsum(tokens) / len(tokens)
    variance = math.fsum((x - mean) ** 2 for x in tokens) / len(tokens)
    offset = 0.0 if shift_mean else mean
    return [[(x - mean) / math.sqrt(variance + 1e-8) + offset for x in row] for row in rows]


def policy_loss(
    logprobs: Rows,
    old: Rows,
    advantages: Rows,
    *,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
) -> Loss:
    """DeepSpeed-Chat's actor_loss_fn as a sum and as a mean, and the clip's diagnostics.

    The objective of a bad token is at least dual_clip * A (https://arxiv.org/abs/1912.09729).
    """
    high = 1 + (cliprange if cliprange_high is None else cliprange_high)
    losses, held, dual_held, kls, ratios = [], [], [], [], []
    for new_row, old_row, advantage_row in zip(logprobs, old, advantages, strict=True):
        for new, before, advantage in zip(new_row, old_row, advantage_row, strict=True):
            ratio = math.exp(new - before)
            surrogate = ratio * advantage
            clipped = clip(ratio, 1 - cliprange, high) * advantage
            objective = min(surrogate, clipped)
            is_bounded = dual_clip is not None and advantage < 0
            bound = dual_clip * advantage if is_bounded else -math.inf
            losses.append(-max(objective, bound))
            held.append(clipped < surrogate)
            dual_held.append(objective < bound)
            kls.append(ratio - 1 - (new - before))
            ratios.append(ratio)
    total, count = math.fsum(losses), len(losses)
    return Loss(
        total,
        total / count,
        sum(held) / count,
        math.fsum(kls) / count,
        max(ratios),
        sum(dual_held) / count,
        math.fsum(ratios) / count,
    )


def gspo_token_loss(
    logprobs: Rows,
    weighing: Rows,
    old: Rows,
    advantages: Rows,
    *,
    cliprange: float,
    cliprange_high: float,
) -> float:
    """https://arxiv.org/abs/2507.18071 eq. 13 and 14: ``weighing`` has the ratio of a response."""
    total = 0.0
    for new_row, weighing_row, old_row, advantage_row in zip(
        logprobs, weighing, old, advantages, strict=True
    ):
        likelihood = math.prod(math.exp(w - o) for w, o in zip(weighing_row, old_row, strict=True))
        for new, weigher, advantage in zip(new_row, weighing_row, advantage_row, strict=True):
            ratio = likelihood ** (1 / len(new_row)) * math.exp(new - weigher)
            held = clip(ratio, 1 - cliprange, 1 + cliprange_high)
            total -= min(ratio * advantage, held * advantage)
    return total


def cispo_loss(
    logprobs: Rows, weighing: Rows, old: Rows, advantages: Rows, *, cliprange_high: float
) -> float:
    """https://arxiv.org/abs/2506.13585 eq. 4: the weights come from ``weighing``, without slope."""
    total = 0.0
    for rows in zip(logprobs, weighing, old, advantages, strict=True):
        for new, weigher, before, advantage in zip(*rows, strict=True):
            total -= min(math.exp(weigher - before), 1 + cliprange_high) * advantage * new
    return total


def dppo_loss(
    logprobs: Rows,
    weighing: Rows,
    old: Rows,
    sampled: Rows,
    advantages: Rows,
    divergence: str,
    *,
    limits: tuple[float, float],
) -> float:
    """https://arxiv.org/abs/2602.04879 eq. 13 and 14: two outcomes, this token or another one.

    The weights come from ``weighing``, without slope, as in ``cispo_loss``.
    """
    total = 0.0
    for rows in zip(logprobs, weighing, old, sampled, advantages, strict=True):
        for new, weigher, before, chosen, advantage in zip(*rows, strict=True):
            p, q = math.exp(weigher), math.exp(chosen)
            distance = abs(p - q)
            if divergence == "kl":
                distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            raised_enough = advantage > 0 and p > q and distance > limits[1]
            lowered_enough = advantage < 0 and p < q and distance > limits[0]
            if not (raised_enough or lowered_enough):
                total -= min(math.exp(weigher - before), 20.0) * advantage * new
    return total


def off_policy_mask(
    logprobs: Rows, sampled: Rows, advantages: Rows, *, max_kl: float
) -> list[list[bool]]:
    """https://arxiv.org/abs/2512.02556 eq. 9."""
    masked = []
    for new_row, old_row, advantage_row in zip(logprobs, sampled, advantages, strict=True):
        kl = math.fsum(o - n for n, o in zip(new_row, old_row, strict=True)) / len(new_row)
        masked.append([kl > max_kl and advantage < 0 for advantage in advantage_row])
    return masked


def rollout_weights(
    logprobs: Rows, sampled: Rows, level: str, *, masks: bool, cap: float, floor: float
) -> tuple[Rows, int]:
    """Weights of tokens, and how many of them a limit has changed."""
    weights, limited = [], 0
    for row, sampled_row in zip(logprobs, sampled, strict=True):
        ratios = [math.exp(p - q) for p, q in zip(row, sampled_row, strict=True)]
        if level == "sequence":
            ratios = [math.prod(ratios)] * len(row)
        elif level == "geometric":
            ratios = [math.prod(ratios) ** (1 / len(row))] * len(row)
        for t, ratio in enumerate(ratios):
            if masks and not floor <= ratio <= cap:
                ratios[t] = 0.0
            elif not masks and ratio > cap:
                ratios[t] = cap
            limited += ratios[t] != ratio
        weights.append(ratios)
    return weights, limited


def value_loss(values: Rows, old: Rows, returns: Rows, *, cliprange: float | None) -> Loss:
    """DeepSpeed-Chat's critic_loss_fn as a sum and as a mean; unclipped with None."""
    losses, held = [], []
    for new_row, old_row, return_row in zip(values, old, returns, strict=True):
        for new, before, target in zip(new_row, old_row, return_row, strict=True):
            near = new if cliprange is None else clip(new, before - cliprange, before + cliprange)
            plain, clipped = (new - target) ** 2, (near - target) ** 2
            losses.append(0.5 * max(plain, clipped))
            held.append(clipped > plain)
    total, count = math.fsum(losses), len(losses)
    return Loss(total, total / count, sum(held) / count)


def controlled_kl_ctl(
    kl_ctl: float, kl_per_sequence: float, *, target: float, horizon: int, num_sequences: int
) -> float:
    """lm-human-preferences' AdaptiveKLController.update."""
    error = clip(kl_per_sequence / target - 1, -0.2, 0.2)
    return kl_ctl * (1 + error * num_sequences / horizon)


def dpo_losses(pairs: Rows, *, beta: float, label_smoothing: float) -> Row:
    """https://arxiv.org/abs/2305.18290 eq. 7 on rows of policy and reference log-probabilities.

    A row has the policy's for chosen and rejected, then the reference's. Smoothing is the
    expectation over labels that are wrong with that chance.
    """
    result = []
    for chosen, rejected, reference_chosen, reference_rejected in pairs:
        win, lose = math.exp(chosen - reference_chosen), math.exp(rejected - reference_rejected)
        right, wrong = (math.log(x**beta / (win**beta + lose**beta)) for x in (win, lose))
        result.append(-(1 - label_smoothing) * right - label_smoothing * wrong)
    return result


def gradient(loss: Callable[[Rows], float], rows: Rows, *, step: float = 1e-5) -> Rows:
    """Central differences of ``loss`` by each token of ``rows``."""
    result = []
    for i, row in enumerate(rows):
        slopes = []
        for t in range(len(row)):
            sides = []
            for sign in (+1, -1):
                moved = [list(r) for r in rows]
                moved[i][t] += sign * step
                sides.append(loss(moved))
            slopes.append((sides[0] - sides[1]) / (2 * step))
        result.append(slopes)
    return result
