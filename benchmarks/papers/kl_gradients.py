"""Gradients of KL estimators as penalties, exact: every answer of a small task is enumerated.

Shapes: A = answers, T = tokens of an answer. A loss of the project is turned into its expectation
by weighting each answer with its probability, without gradient, as sampling does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from papers.claims import Figures, Outcome, PaperResult, Place, Verdict
from papers.pooled import pooled
from rlhf.algorithms.advantages import gae, token_rewards
from rlhf.algorithms.kl import KlEstimatorName, estimate_kl
from rlhf.algorithms.ppo import policy_loss
from rlhf_lab.gradients.enumerated import (
    AnswerTable,
    answer_logprobs,
    draw_logits,
    enumerate_answers,
)

EXACT = 1e-10  # largest difference of two gradients that are equal
POLICIES = 20  # random pairs of policy and reference for one seed
SMALL_STEPS = (0.1, 0.01)  # distances of the policy from the reference, as shares of a random one
SHRINKS = (5, 20)  # times, of the bias from the first to the second: about 10 if of first order
LEAST_BIAS = 0.01  # of the norm of the right gradient
IDENTITIES = {
    "k1_reward": "k1 in the reward = KL(policy || reference)",
    "k2_loss": "k2 in the loss = k1 in the reward",
    "k1_loss": "k1 in the loss = 0",
    "k3_loss": "k3 in the loss = KL(reference || policy)",
    "k3_reward": "k3 in the reward = KL(policy || reference) - KL(reference || policy)",
    "k2_token": "k2 of tokens in the loss = k1 of tokens in their own advantage",
    "k3_token": "k3 of tokens in the loss = mean over prefixes of KL(reference || policy)",
}


class Task(NamedTuple):
    """A policy, by its logits, and a reference."""

    answers: AnswerTable
    logits_PV: Tensor
    reference_PV: Tensor

    @property
    def reference_AT(self) -> Tensor:
        """Log-probability of every token under the reference."""
        return answer_logprobs(self.reference_PV, self.answers)


def gradient(task: Task, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient at the logits of ``loss``, a function of the log-probs (A, T)."""
    logits_PV = task.logits_PV.clone().requires_grad_()
    (grad_PV,) = torch.autograd.grad(loss(answer_logprobs(logits_PV, task.answers)), logits_PV)
    return grad_PV


def whole(logprobs_AT: Tensor) -> Tensor:
    """Return the log-probability (A, 1) of whole answers."""
    return logprobs_AT.sum(dim=1, keepdim=True)


def expect(values_AT: Tensor, logprobs_AT: Tensor) -> Tensor:
    """Return the mean over answers of the sum of their values; answers count, gradients do not."""
    return (whole(logprobs_AT).detach().exp() * values_AT).sum()


def reverse_kl(task: Task) -> Tensor:
    """Return the gradient of KL(policy || reference) of whole answers, from its definition."""

    def kl(logprobs_AT: Tensor) -> Tensor:
        log_A1 = whole(logprobs_AT)
        return (log_A1.exp() * (log_A1 - whole(task.reference_AT))).sum()

    return gradient(task, kl)


def forward_kl(task: Task) -> Tensor:
    """Return the gradient of KL(reference || policy) of whole answers, from its definition."""

    def kl(logprobs_AT: Tensor) -> Tensor:
        reference_A1 = whole(task.reference_AT)
        return (reference_A1.exp() * (reference_A1 - whole(logprobs_AT))).sum()

    return gradient(task, kl)


def forward_kl_by_prefix(task: Task) -> Tensor:
    """Return the gradient of KL(reference || policy) at each prefix that the policy visits.

    The probability of a prefix, which is that of reaching it under the policy, has no gradient.
    """
    answers, reference_AT = task.answers, task.reference_AT
    log_AT = answer_logprobs(task.logits_PV, answers)
    reached_PV = torch.zeros_like(task.logits_PV)  # each cell: the policy reaches the prefix
    place = (answers.prefix_AT[answers.keep_AT], answers.tokens_AT[answers.keep_AT])
    before_AT = log_AT.cumsum(dim=1) - log_AT
    reached_PV[place] = before_AT.exp()[answers.keep_AT]
    given_PV = torch.zeros_like(task.logits_PV)
    given_PV[place] = reference_AT.exp()[answers.keep_AT]
    logits_PV = task.logits_PV.clone().requires_grad_()
    loss = -(reached_PV * given_PV * logits_PV.log_softmax(dim=1)).sum()
    return torch.autograd.grad(loss, logits_PV)[0]


def kl_in_loss(task: Task, estimator: KlEstimatorName, *, by_token: bool = False) -> Tensor:
    """Return the gradient of ``estimate_kl`` as a loss: of whole answers, or of their tokens."""
    reference_AT = task.reference_AT

    def loss(log_AT: Tensor) -> Tensor:
        sides = (log_AT, reference_AT)
        if not by_token:
            sides = (whole(log_AT), whole(reference_AT))
        return expect(estimate_kl(*sides, estimator=estimator), log_AT)

    return gradient(task, loss)


def kl_in_reward(task: Task, estimator: KlEstimatorName, *, gamma: float = 1.0) -> Tensor:
    """Return the gradient of PPO's loss with the penalty of tokens as reward, without a critic.

    With gamma 0 each token is charged its own penalty only.
    """
    log_AT = answer_logprobs(task.logits_PV, task.answers)
    kl_AT = estimate_kl(log_AT, task.reference_AT, estimator=estimator)
    return _ppo_gradient(task, kl_AT, torch.zeros(len(kl_AT), dtype=torch.float64), gamma)


def kl_as_score(task: Task, estimator: KlEstimatorName) -> Tensor:
    """Return the gradient of PPO's loss with the penalty of whole answers, taken off the score."""
    log_AT = answer_logprobs(task.logits_PV, task.answers)
    kl_A1 = estimate_kl(whole(log_AT), whole(task.reference_AT), estimator=estimator)
    return _ppo_gradient(task, torch.zeros_like(log_AT), -kl_A1[:, 0], 1.0)


def _ppo_gradient(task: Task, kl_AT: Tensor, scores_A: Tensor, gamma: float) -> Tensor:
    old_AT, keep_AT = answer_logprobs(task.logits_PV, task.answers), task.answers.keep_AT
    rewards_AT = token_rewards(kl_AT, scores_A, keep_AT, kl_ctl=1.0)
    values_AT = torch.zeros_like(rewards_AT)
    advantages_AT, _ = gae(rewards_AT, values_AT, keep_AT, gamma=gamma, lam=1.0)

    def loss(log_AT: Tensor) -> Tensor:
        def total(loss_AT: Tensor, _: Tensor) -> Tensor:
            return expect(loss_AT, log_AT)

        return policy_loss(log_AT, old_AT, advantages_AT, keep_AT, cliprange=0.2, total=total).loss

    return gradient(task, loss)


def errors(task: Task) -> dict[str, float]:
    """Return the largest difference of the two sides of every identity."""
    reverse_PV, forward_PV = reverse_kl(task), forward_kl(task)
    sides = {
        "k1_reward": (kl_in_reward(task, "k1"), reverse_PV),
        "k2_loss": (kl_in_loss(task, "k2"), kl_in_reward(task, "k1")),
        "k1_loss": (kl_in_loss(task, "k1"), torch.zeros_like(reverse_PV)),
        "k3_loss": (kl_in_loss(task, "k3"), forward_PV),
        "k3_reward": (kl_as_score(task, "k3"), reverse_PV - forward_PV),
        "k2_token": (kl_in_loss(task, "k2", by_token=True), kl_in_reward(task, "k1", gamma=0.0)),
        "k3_token": (kl_in_loss(task, "k3", by_token=True), forward_kl_by_prefix(task)),
    }
    assert sides.keys() == IDENTITIES.keys()
    return {name: float((left - right).abs().max()) for name, (left, right) in sides.items()}


def bias(task: Task) -> float:
    """Return how far k3 in the loss is from the gradient of the KL, as a share of its norm."""
    right_PV = reverse_kl(task)
    return float((kl_in_loss(task, "k3") - right_PV).norm() / right_PV.norm())


def measure(seed: int, place: Place) -> Figures:
    """Return the errors of the identities and the bias of k3, over random policies."""
    generator = torch.Generator().manual_seed(seed)
    answers = enumerate_answers()
    found: dict[str, list[float]] = {}
    for _ in range(2 if place.is_quick else POLICIES):
        reference_PV, change_PV = (draw_logits(generator, answers) for _ in range(2))
        task = Task(answers, reference_PV + change_PV, reference_PV)
        measured = errors(task) | {"bias": bias(task)}
        for step in SMALL_STEPS:
            measured[f"bias_{step}"] = bias(
                task._replace(logits_PV=reference_PV + step * change_PV)
            )
        for name, value in measured.items():
            found.setdefault(name, []).append(value)
    return dict(found)


def judge(figures: Mapping[int, Figures]) -> Verdict:
    """Judge all policies of all seeds."""
    of_all = {name: pooled(figures, name) for name in next(iter(figures.values()))}
    worst = {name: float(of_all[name].max()) for name in IDENTITIES}
    broken = [IDENTITIES[name] for name, error in worst.items() if not error <= EXACT]
    bias, near, nearer = (of_all[f"bias{step}"] for step in ("", *(f"_{s}" for s in SMALL_STEPS)))
    least, most = float(bias.min()), float(bias.max())
    fewest_times, most_times = float((near / nearer).min()), float((near / nearer).max())
    is_first_order = fewest_times >= SHRINKS[0] and most_times <= SHRINKS[1]
    found = (
        f"{bias.numel()} policies: the identities hold to {max(worst.values()):.0e}"
        + "".join(f"; broken: {each}" for each in broken)
        + f"; k3 in the loss is off by {least:.2f} to {most:.2f} of the gradient's norm, and"
        f" {fewest_times:.1f} to {most_times:.1f} times less where the policy is ten times nearer"
        " to the reference"
    )
    holds = not broken and least > LEAST_BIAS and is_first_order
    return Verdict(Outcome.PASSED if holds else Outcome.FAILED, found)


RESULT = PaperResult(
    title="Gradients of KL estimators",
    source="https://arxiv.org/abs/2510.01555 section 4; https://arxiv.org/abs/2512.21852 section 3",
    claim=(
        "On-policy, k1 in the reward has the gradient of KL(policy || reference), and k2 in the"
        " loss has the same; k1 in the loss has a mean gradient of zero; k3 is biased in the loss,"
        " where it agrees only to first order in the distance, and in the reward."
    ),
    criterion=(
        f"passed: for every random policy, in fp64 and over all answers of at most 3 tokens, each"
        f" of these is equal to {EXACT:.0e}: {'; '.join(IDENTITIES.values())}; k3 in the loss is"
        f" off by more than {LEAST_BIAS:.0%} of the norm of the gradient of KL(policy ||"
        f" reference), and this share shrinks by {SHRINKS[0]} to {SHRINKS[1]} times if the policy"
        " comes from a tenth to a hundredth of the distance to the reference. failed: otherwise."
    ),
    seeds=(1, 2, 3, 4, 5),
    minutes=0.1,
    measure=measure,
    judge=judge,
)
