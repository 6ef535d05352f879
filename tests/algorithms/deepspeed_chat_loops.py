"""DeepSpeed-Chat's mathematics as its published walk-throughs print it, in plain Python loops.

Everything is in DeepSpeed-Chat's own coordinates: a row is a whole sequence of ``prompt_width``
left-padded prompt tokens and the response after it, action i is the choice of token i + 1, the
first action of a response is ``prompt_width - 1``, and masks are read off the ids: what is not the
padding id counts. Nothing here comes from ``rlhf``; the losses are those of ``loop_reference``.

The walk-throughs show two editions. This is the late one, which zeroes rewards and values behind a
response. It puts the score on the end token if the padding is the end token.
"""

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


def lm_loss(logits: list[Rows], ids: Ids) -> float:
    """The unsupervised loss: mean over all tokens but the first of each block."""
    losses = [-x for row in gather_log_probs(logits, ids) for x in row]
    return sum(losses) / len(losses)
