"""DeepSpeed-Chat's mathematics as its published walk-throughs print it, in plain Python loops.

Everything is in DeepSpeed-Chat's own coordinates: a row is a whole sequence of ``prompt_width``
left-padded prompt tokens and the response after it, action i is the choice of token i + 1, the
first action of a response is ``prompt_width - 1``, and masks are read off the ids: what is not the
padding id counts. Losses are means. Nothing here comes from ``rlhf``.

The walk-throughs show two editions. This is the late one, which zeroes rewards and values behind a
response. It puts the score on the end token if the padding is the end token.
"""

import math
from typing import NamedTuple

from tests.algorithms.loop_reference import Row, Rows, clip, log_softmax

KL_CTL, CLIP_REWARD, CLIPRANGE, CLIPRANGE_VALUE, GAMMA, LAM = 0.1, 5.0, 0.2, 0.2, 1.0, 0.95
Ids = list[list[int]]
Mask = list[list[int]]


class Experience(NamedTuple):
    """Whole sequences with what the four models said of them, one entry per action."""

    ids: Ids
    prompt_width: int
    pad_id: int
    logprobs: Rows
    ref_logprobs: Rows
    values: Rows
    scores: Row

    @property
    def start(self) -> int:
        """The first action of every response."""
        return self.prompt_width - 1

    def action_mask(self) -> Mask:
        """Actions whose token is not padding."""
        return [[int(token != self.pad_id) for token in row[1:]] for row in self.ids]

    def ends(self) -> list[int]:
        """One past the last action of each response."""
        return [self.start + sum(row[self.start :]) + 1 for row in self.action_mask()]


class Targets(NamedTuple):
    """Rewards of all actions; advantages and returns of the responses' actions."""

    rewards: Rows
    advantages: Rows
    returns: Rows


def gather_log_probs(logits: list[Rows], ids: Ids) -> Rows:
    """Log-probability of each token but the first, from the logits one position before it."""
    return [
        [log_softmax(rows[i], 1.0)[row[i + 1]] for i in range(len(row) - 1)]
        for rows, row in zip(logits, ids, strict=True)
    ]


def compute_rewards(experience: Experience) -> Rows:
    """The price of KL on every action, and the clipped score on the last one before the end."""
    rewards = [
        [-KL_CTL * (p - q) for p, q in zip(*rows, strict=True)]
        for rows in zip(experience.logprobs, experience.ref_logprobs, strict=True)
    ]
    for row, end, score in zip(rewards, experience.ends(), experience.scores, strict=True):
        row[min(end, len(row)) - 1] += clip(score, -CLIP_REWARD, CLIP_REWARD)
    return rewards


def targets(experience: Experience) -> Targets:
    """Advantages and returns from the first response action to the last column."""
    rewards, start = compute_rewards(experience), experience.start
    values = [list(row) for row in experience.values]
    for *row_of_each, end in zip(rewards, values, experience.ends(), strict=True):
        for row in row_of_each:
            row[end:] = [0.0] * len(row[end:])
    advantages, returns = [], []
    for r, v in zip(rewards, values, strict=True):
        last, backwards = 0.0, []
        for t in range(len(r) - 1, start - 1, -1):
            next_value = v[t + 1] if t < len(r) - 1 else 0.0
            last = r[t] + GAMMA * next_value - v[t] + GAMMA * LAM * last
            backwards.append(last)
        advantages.append(backwards[::-1])
        returns.append([a + v[start + t] for t, a in enumerate(advantages[-1])])
    return Targets(rewards, advantages, returns)


def actor_loss(logprobs: Rows, old_logprobs: Rows, advantages: Rows, mask: Mask) -> float:
    """Mean clipped surrogate of the masked actions."""
    total, count = 0.0, 0
    for row in zip(logprobs, old_logprobs, advantages, mask, strict=True):
        for new, old, advantage, counts in zip(*row, strict=True):
            if counts:
                ratio = math.exp(new - old)
                plain, clipped = (
                    -advantage * ratio,
                    -advantage * clip(ratio, 1 - CLIPRANGE, 1 + CLIPRANGE),
                )
                total, count = total + max(plain, clipped), count + 1
    return total / count


def critic_loss(values: Rows, old_values: Rows, returns: Rows, mask: Mask) -> float:
    """Half the mean squared error of the masked actions, values held near the old ones."""
    total, count = 0.0, 0
    for row in zip(values, old_values, returns, mask, strict=True):
        for new, old, target, counts in zip(*row, strict=True):
            if counts:
                held = clip(new, old - CLIPRANGE_VALUE, old + CLIPRANGE_VALUE)
                total += max((new - target) ** 2, (held - target) ** 2)
                count += 1
    return 0.5 * total / count


class Pair(NamedTuple):
    """One preference pair, right-padded to one length, with the values of its tokens."""

    chosen: list[int]
    rejected: list[int]
    chosen_values: Row
    rejected_values: Row


class PairResult(NamedTuple):
    """Loss of one pair, and the scores at its ends."""

    loss: float
    chosen_end: float
    rejected_end: float


def first_difference(chosen: list[int], rejected: list[int]) -> int:
    """The first position where two rows differ."""
    return next(i for i, (a, b) in enumerate(zip(chosen, rejected, strict=True)) if a != b)


def reward_loss(pair: Pair, *, pad_id: int) -> PairResult:
    """Mean pairwise loss from the first difference to the end of the longer sequence."""
    length = len(pair.chosen)
    ends = [row.index(pad_id) if pad_id in row else length for row in pair[:2]]
    losses = []
    for i in range(first_difference(pair.chosen, pair.rejected), max(ends)):
        margin = pair.chosen_values[i] - pair.rejected_values[i]
        losses.append(math.log(1 + math.exp(-margin)))
    return PairResult(
        sum(losses) / len(losses),
        pair.chosen_values[ends[0] - 1],
        pair.rejected_values[ends[1] - 1],
    )


def lm_loss(logits: list[Rows], ids: Ids) -> float:
    """The unsupervised loss: mean over all tokens but the first of each block."""
    losses = [-x for row in gather_log_probs(logits, ids) for x in row]
    return sum(losses) / len(losses)
