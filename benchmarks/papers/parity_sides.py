"""What the comparisons with other projects share: tensors, and our side of each loss.

Shapes: B = responses, T = tokens, G responses to one prompt. Everything is in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.dpo import DpoLossLiteral, dpo_loss
from rlhf.algorithms.kl import KlEstimatorName, estimate_kl
from rlhf.algorithms.masking import whiten
from rlhf.algorithms.ppo import PolicyLoss, policy_loss, value_loss
from rlhf.algorithms.reward import end_loss
from rlhf.base.metrics import Moments
from rlhf.base.ranks import Ranks
from rlhf.config.schema.ppo import LossAggregation
from rlhf.phases.ppo.objective import Aggregation

GROUP = 4
ROWS = 6 * GROUP
WIDTH = 10
LONGEST = 12  # tokens that a response may have; no response here has more than WIDTH
LOW, HIGH, VALUE_CLIP, DUAL = 0.2, 0.28, 0.2, 3.0
GAMMA, LAM, KL_COEF, BETA, SMOOTHING = 0.97, 0.9, 0.05, 0.3, 0.1
CLIPS = {"cliprange": LOW, "cliprange_high": HIGH}
N_MINUS_1 = "the variance is divided by n - 1 tokens (here: n)"
HOLES = 0.3  # share of tokens within a response that are not the policy's

Tensors = Mapping[str, Tensor]


class Inputs(NamedTuple):
    """Random tensors; cells that are not kept hold numbers, which must change nothing."""

    logprobs_BT: Tensor
    old_BT: Tensor
    reference_BT: Tensor
    far_BT: Tensor  # a reference that finds some tokens far more or less likely
    values_BT: Tensor
    old_values_BT: Tensor
    returns_BT: Tensor
    advantages_BT: Tensor
    row_advantages_B: Tensor
    scores_B: Tensor
    kl_BT: Tensor  # 0 in cells that are not kept
    margins_B: Tensor
    keep_BT: Tensor
    holes_BT: Tensor  # as keep_BT, but with tokens of others between the turns of a response

    @classmethod
    def draw(cls, seed: int) -> Inputs:
        """Return the tensors of a seed: ratios on both sides of every clip occur."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        old_BT = -1.5 + 0.5 * normal(ROWS, WIDTH)
        logprobs_BT = old_BT + 0.4 * normal(ROWS, WIDTH)
        lengths_B1 = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=generator)
        lengths_B1[0], lengths_B1[1] = WIDTH, 1
        keep_BT = torch.arange(WIDTH) < lengths_B1
        holes_BT = keep_BT & (torch.rand((ROWS, WIDTH), generator=generator) > HOLES)
        holes_BT[:, 0] = True
        advantages_BT = normal(ROWS, WIDTH)
        logprobs_BT[0, :2] = old_BT[0, :2] + 1.5  # ratio 4.5, which the dual clip bounds
        advantages_BT[0, :2] = torch.tensor([-1.2, 0.7])
        reference_BT = logprobs_BT + 0.4 * normal(ROWS, WIDTH)
        far_BT = reference_BT + torch.tensor([0.0, 12.0, -12.0, 25.0, 3.0] * (WIDTH // 5))
        values_BT = normal(ROWS, WIDTH)
        return cls(
            logprobs_BT=logprobs_BT,
            old_BT=old_BT,
            reference_BT=reference_BT,
            far_BT=far_BT,
            values_BT=values_BT,
            old_values_BT=values_BT + 0.4 * normal(ROWS, WIDTH),
            returns_BT=values_BT + normal(ROWS, WIDTH),
            advantages_BT=advantages_BT,
            row_advantages_B=normal(ROWS),
            scores_B=normal(ROWS),
            kl_BT=(0.3 * normal(ROWS, WIDTH)).masked_fill(~keep_BT, 0.0),
            margins_B=normal(ROWS).abs(),
            keep_BT=keep_BT,
            holes_BT=holes_BT,
        )

    @property
    def spread_BT(self) -> Tensor:
        """The advantages (B, T) that are equal within a response."""
        return self.row_advantages_B[:, None].expand(ROWS, WIDTH)

    @property
    def end_rewards_BT(self) -> Tensor:
        """The scores as rewards at the last kept tokens."""
        last_B1 = self.keep_BT.sum(dim=1, keepdim=True) - 1
        return torch.zeros_like(self.kl_BT).scatter(1, last_B1, self.scores_B[:, None])


class Sides(NamedTuple):
    """The same tensors, computed by a peer and here."""

    theirs: Tensors
    ours: Tensors

    @property
    def gap(self) -> float:
        """The largest difference of an element, as a share of its tensor's largest element."""
        assert self.theirs.keys() == self.ours.keys()
        shares = [
            (theirs.double() - self.ours[name]).abs().max() / self.ours[name].abs().max()
            for name, theirs in self.theirs.items()
        ]
        return float(torch.stack(shares).max())  # of tensors: it keeps a NaN


class Pair(NamedTuple):
    """A function of a peer, and ours."""

    quantity: str
    theirs: str  # its file and name
    ours: str
    as_is: Callable[[Inputs], Sides]
    difference: str = ""  # what the peer computes differently, in words
    undone: Callable[[Inputs], Sides] | None = None  # the same without this difference


def graded(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensors:
    """Return the value of a loss and its gradient."""
    at = at.clone().requires_grad_()
    value = loss(at)
    (gradient,) = torch.autograd.grad(value.sum(), at)
    return {"value": value.detach(), "gradient": gradient}


def kept(keep_BT: Tensor, **tensors_BT: Tensor) -> Tensors:
    """Return the kept cells of tensors: the others have no meaning."""
    return {name: tensor_BT[keep_BT] for name, tensor_BT in tensors_BT.items()}


def our_policy(
    inputs: Inputs,
    loss: Callable[..., PolicyLoss] = policy_loss,
    *,
    how: LossAggregation = LossAggregation.token_mean,
    advantages_BT: Tensor | None = None,
    kl_coef: float = 0.0,
    estimator: KlEstimatorName = "k3",
    longest: int = LONGEST,
    **clips: float,
) -> Tensors:
    """Return our policy loss over a mini-batch, with a KL in the loss if ``kl_coef`` is above 0."""
    given_BT = inputs.advantages_BT if advantages_BT is None else advantages_BT
    keep_BT, config = inputs.keep_BT, SimpleNamespace(loss_aggregation=how)
    mean = Aggregation.build_for_mini_batch(config, keep_BT, Ranks(), max_tokens=longest)

    def value(logprobs_BT: Tensor) -> Tensor:
        total = loss(logprobs_BT, inputs.old_BT, given_BT, keep_BT, total=mean.total, **clips).loss
        sides = (logprobs_BT, inputs.reference_BT)
        kl_BT = estimate_kl(*sides, estimator=estimator, sampled_logprobs=inputs.old_BT)
        return (total + kl_coef * mean.total(kl_BT, keep_BT)) / mean.divisor

    return graded(value, inputs.logprobs_BT)


def our_value(inputs: Inputs) -> Tensors:
    """Return our value loss per token."""
    keep_BT = inputs.keep_BT

    def value(values_BT: Tensor) -> Tensor:
        sides = (values_BT, inputs.old_values_BT, inputs.returns_BT, keep_BT)
        return value_loss(*sides, cliprange_value=VALUE_CLIP).loss / keep_BT.sum()

    return graded(value, inputs.values_BT)


def our_kl(inputs: Inputs, estimator: KlEstimatorName) -> Tensors:
    """Return our estimator of every token's KL."""
    return graded(
        lambda at: estimate_kl(at, inputs.reference_BT, estimator=estimator), inputs.logprobs_BT
    )


def far_kl(
    inputs: Inputs,
    estimator: KlEstimatorName,
    *,
    low: float = -torch.inf,
    high: float = torch.inf,
) -> Tensors:
    """Return our estimator far from the reference, cut to a range."""

    def value(at: Tensor) -> Tensor:
        return estimate_kl(at, inputs.far_BT, estimator=estimator).clamp(low, high)

    return graded(value, inputs.logprobs_BT)


def pair_logprobs(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs of chosen and rejected responses, then those of the reference.

    The first half of the rows are the chosen responses.
    """
    policy_B, reference_B = (
        each_BT.masked_fill(~inputs.keep_BT, 0.0).sum(dim=1)
        for each_BT in (inputs.logprobs_BT, inputs.reference_BT)
    )
    half = ROWS // 2
    return policy_B[:half], policy_B[half:], reference_B[:half], reference_B[half:]


def our_dpo(
    inputs: Inputs, *, loss: DpoLossLiteral = "sigmoid", label_smoothing: float = 0.0
) -> Tensors:
    """Return our DPO loss per pair, at the log-probs of chosen responses."""
    chosen_B, *others = pair_logprobs(inputs)

    def value(at: Tensor) -> Tensor:
        found = dpo_loss(at, *others, beta=BETA, label_smoothing=label_smoothing, loss=loss)
        return found.loss / len(at)

    return graded(value, chosen_B)


def our_pairs(inputs: Inputs) -> Tensors:
    """Return our pair loss of a reward model with margins, at the scores of chosen responses."""
    half = ROWS // 2
    rejected_B, margins_B = inputs.scores_B[half:], inputs.margins_B[half:]
    return graded(lambda at: end_loss(at, rejected_B, margins_B).mean(), inputs.scores_B[:half])


def our_whitened(x_BT: Tensor, keep_BT: Tensor, *, is_sample: bool = False) -> Tensor:
    """Return our whitened tensor; ``is_sample`` divides the variance by n - 1 instead of n."""
    moments = Moments.of(x_BT, keep_BT)
    if is_sample:
        count = moments.count
        spread = moments.variance * count / (count - 1)
        moments = Moments(moments.total, (spread + moments.mean.square()) * count, count)
    return whiten(x_BT, keep_BT, moments)


def our_whitening(inputs: Inputs, *, is_sample: bool = False) -> Tensors:
    """Return our whitened advantages."""
    keep_BT = inputs.keep_BT
    whitened_BT = our_whitened(inputs.advantages_BT, keep_BT, is_sample=is_sample)
    return kept(keep_BT, whitened=whitened_BT)
