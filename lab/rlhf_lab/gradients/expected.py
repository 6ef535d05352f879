"""Compute the expected gradient of PPO's loss and the exact gradient of its objective.

No part of the loss is written again here: ``TargetMaker`` turns scores into advantages, hooks of
options change it, and ``Objective`` computes the loss, as in ``PPOTrainer``. An expectation is the
gradient of one batch that has all answers of a tiny task, weighted by their probabilities; so
statistics over the batch, such as the deviation for whitening, are those of a large batch.

Shapes: as in ``enumerated``; the T of a batch is the T of the answer table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import comb
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from rlhf.algorithms.advantages import reinforce_pp_advantages
from rlhf.base.errors import ConfigError
from rlhf.base.metrics import Moments
from rlhf.base.ranks import Ranks
from rlhf.base.types import PromptBatch, Responses, Rollout, take_rows
from rlhf.config.schema.ppo import COMPARING
from rlhf.config.schema.run import RunConfig
from rlhf.phases.ppo.hooks import PpoHook, build_hooks
from rlhf.phases.ppo.logprob_reuse import LogprobReuse
from rlhf.phases.ppo.objective import (
    SURROGATES,
    Aggregation,
    MicroBatch,
    Objective,
    Surrogate,
    learned_mask,
)
from rlhf.phases.ppo.targets import TargetMaker, Targets
from rlhf.phases.shared.scoring import ResponseLogprobs, WholeSequences
from rlhf_lab.gradients.enumerated import (
    AnswerTable,
    WeightedRows,
    answer_logprobs,
    draw_groups,
    draw_logits,
    enumerate_answers,
    enumerate_groups,
)

PROMPTS = 3
MOST_ROWS = 4000  # most answers in all groups of a prompt; only the smallest task may have more
LARGEST_GROUP = 64
TASKS = ((2, 3), (2, 2), (1, 2))  # letters and tokens of tasks; larger groups get smaller tasks
DISTANCE = 0.5  # from reference to policy logits, in standard deviations of the logits


class TinyTask(NamedTuple):
    """A policy and a reference, by their logits, and the scores of all answers."""

    answers: AnswerTable
    policy_QPV: Tensor
    reference_QPV: Tensor
    scores_QA: Tensor

    @classmethod
    def draw(cls, seed: int, group: int) -> Self:
        """Return a random task that is small enough to list all groups of ``group`` answers.

        Raises:
            ConfigError: if the group is too large.
        """
        generator = torch.Generator().manual_seed(seed)
        if group > LARGEST_GROUP:
            raise ConfigError(
                f"ppo.responses_per_prompt={group}: for this command, must be at most "
                f"{LARGEST_GROUP}, since all groups are enumerated; larger groups have less bias"
            )
        for letters, max_tokens in TASKS:
            answers = enumerate_answers(letters, max_tokens)
            if comb(len(answers.keep_AT) + group - 1, group) * group <= MOST_ROWS:
                break
        reference_QPV, change_QPV = (draw_logits(generator, answers, PROMPTS) for _ in range(2))
        shape = (PROMPTS, len(answers.keep_AT))
        scores_QA = torch.randn(shape, generator=generator, dtype=torch.float64)
        return cls(answers, reference_QPV + DISTANCE * change_QPV, reference_QPV, scores_QA)

    def logprobs(self, logits_QPV: Tensor) -> Tensor:
        """Return the log-probabilities (Q, A, T) of all tokens under a policy."""
        return answer_logprobs(logits_QPV, self.answers)

    def gradient_of_objective(
        self, logits_QPV: Tensor, scores_QA: Tensor, *, kl_ctl: float
    ) -> Tensor:
        """Return the gradient (Q, P, V) of E[score] - kl_ctl * KL, the mean over prompts."""
        at_QPV = logits_QPV.clone().requires_grad_()
        log_QA = self.logprobs(at_QPV).sum(dim=2)
        reference_QA = self.logprobs(self.reference_QPV).sum(dim=2)
        values_QA = log_QA.exp() * (scores_QA - kl_ctl * (log_QA - reference_QA))
        return torch.autograd.grad(values_QA.sum() / len(values_QA), at_QPV)[0]

    def move(self, start_QPV: Tensor, direction_QPV: Tensor, nats: float) -> Tensor:
        """Move logits in a direction until the mean KL(start || logits) per token is ``nats``.

        The step along the direction is found by bisection; its norm is at most 100.
        """
        start_QAT = self.logprobs(start_QPV)
        reach_QA = start_QAT.sum(dim=2).exp()
        tokens = (reach_QA * self.answers.keep_AT.sum(dim=1)).sum()

        def kl(step: float) -> float:
            moved_QAT = self.logprobs(start_QPV + step * direction_QPV)
            return float(((start_QAT - moved_QAT).sum(dim=2) * reach_QA).sum() / tokens)

        low, high = 0.0, 100.0 / float(direction_QPV.norm())
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if kl(middle) < nats else (low, middle)
        return start_QPV + low * direction_QPV


class Policies(NamedTuple):
    """The logits (Q, P, V) of the three policies of an update."""

    sampled_QPV: Tensor  # the policy that sampled the answers
    start_QPV: Tensor  # the policy before the first update of the step
    current_QPV: Tensor  # the policy that the update trains


@dataclass(frozen=True)
class GradientEstimator:
    """The targets and loss of a configuration, with the user's surrogate and hook, if any."""

    config: RunConfig
    surrogate: Surrogate | None = None
    hook: type[PpoHook] | None = None

    def with_keys(self, **keys: Any) -> GradientEstimator:
        """Return the estimator with other values of the group ``ppo``."""
        return replace(self, config=replace(self.config, ppo=replace(self.config.ppo, **keys)))

    @property
    def group(self) -> int:
        """Return how many responses to a prompt the estimator compares; 1 if it compares none."""
        ppo = self.config.ppo
        return ppo.responses_per_prompt if ppo.advantage_estimator in COMPARING else 1

    @cached_property
    def hooks(self) -> Sequence[PpoHook]:
        """Return the hooks of options, and the user's hook."""
        user_hooks = [] if self.hook is None else [self.hook(self.config)]
        return [*build_hooks(self.config), *user_hooks]

    def make_targets(self, rollout: Rollout, weights_B: Tensor) -> Targets:
        """Return rewards and advantages; batch statistics give row i the weight weights_B[i]."""
        maker = TargetMaker(self.config.ppo, Ranks(), {}, self.hooks)

        def weighted_moments(x: Tensor, keep: Tensor) -> Moments:
            weights = keep * (weights_B if x.dim() == 1 else weights_B[:, None])
            kept = x.masked_fill(~keep, 0.0)
            return Moments((weights * kept).sum(), (weights * kept**2).sum(), weights.sum())

        maker.moments_over_ranks = weighted_moments  # type: ignore[method-assign]
        maker.update_moments(rollout)
        return maker.make(rollout, kl_ctl=self.config.ppo.kl_ctl)


class TinyStep:
    """A step of PPO on a task: a rollout of one policy, and gradients at another policy."""

    def __init__(self, method: GradientEstimator, task: TinyTask, policies: Policies) -> None:
        self.method, self.task, self.policies = method, task, policies
        self.sampled_QAT = task.logprobs(policies.sampled_QPV)
        self.start_QAT = task.logprobs(policies.start_QPV)
        self.reference_QAT = task.logprobs(task.reference_QPV)
        shape = (len(self.sampled_QAT), task.answers.logits_shape[0])
        self.values_QP = torch.zeros(shape, dtype=torch.float64)
        self.rows = enumerate_groups(self.sampled_QAT.sum(dim=2), method.group)
        targets = method.make_targets(self._rollout(self.rows), self.rows.weights_B)
        self.values_QP = self._exact_values(targets)
        self.scores_QA = torch.zeros_like(task.scores_QA)  # scaled and clipped
        self.scores_QA[self.rows.prompt_B, self.rows.answer_B] = targets.scores_B

    def exact_gradient(self) -> Tensor:
        """Return the gradient of the objective, with the scores after scaling and clipping."""
        at_QPV, kl_ctl = self.policies.current_QPV, self.method.config.ppo.kl_ctl
        return self.task.gradient_of_objective(at_QPV, self.scores_QA, kl_ctl=kl_ctl)

    def expected_gradient(self) -> Tensor:
        """Return the expected direction of an update: minus the gradient of the loss."""
        return self._gradient(self.rows, range(len(self.rows.weights_B)))

    def sampled_gradient(self, generator: torch.Generator) -> Tensor:
        """Return the direction of an update by one mini-batch of a sampled rollout."""
        ppo, size = self.method.config.ppo, self.method.group
        logs_QA, groups = self.sampled_QAT.sum(dim=2), ppo.rollout_batch_size // size
        rows = draw_groups(logs_QA, size, groups=groups, generator=generator)
        order = torch.randperm(len(rows.weights_B), generator=generator)
        return self._gradient(rows, order[: ppo.mini_batch_size].tolist())

    def _gradient(self, rows: WeightedRows, chosen: Sequence[int]) -> Tensor:
        method, config = self.method, self.method.config
        rollout = self._rollout(rows)
        targets = method.make_targets(rollout, rows.weights_B)
        surrogate = method.surrogate or SURROGATES[config.ppo.surrogate]
        for hook in method.hooks:
            surrogate = hook.change_surrogate(surrogate)
        if len(chosen) < len(rows.weights_B):
            rows, rollout = take_rows(rows, [*chosen]), take_rows(rollout, [*chosen])
            targets = targets._replace(advantages=take_rows(targets.advantages, [*chosen]))
        at_QPV = self.policies.current_QPV.clone().requires_grad_()
        batch = MicroBatch(
            WholeSequences(rollout.prompts, rollout.responses),
            learned_mask(config.ppo, rollout),
            rollout.logprobs_BT,
            rollout.sampled_logprobs_BT,
            rollout.reference_logprobs_BT,
            rollout.values_BT,
            *targets.advantages,
        )
        weights_B1, keep_BT = rows.weights_B[:, None], batch.keep_BT
        mean = Aggregation.build_for_mini_batch(
            config.ppo, keep_BT * weights_B1, Ranks(), max_tokens=keep_BT.shape[1]
        )
        weighted_mean = mean._replace(total=lambda x_BT, keep: mean.total(x_BT * weights_B1, keep))
        ppo = config.ppo
        objective = Objective(ppo, surrogate, ppo.kl_ctl, ppo.entropy_coef, weighted_mean, False)
        loss, _ = objective.actor_loss(self._run_policy(at_QPV, rows, keep_BT), batch)
        return -torch.autograd.grad(loss, at_QPV)[0]

    def _run_policy(
        self, logits_QPV: Tensor, rows: WeightedRows, keep_BT: Tensor
    ) -> ResponseLogprobs:
        logs_QPV = logits_QPV.log_softmax(dim=-1)
        entropy_QP = -(logs_QPV.exp() * logs_QPV).sum(dim=-1)
        prefix_BT = self.task.answers.prefix_AT[rows.answer_B]
        logprobs_BT = self.task.logprobs(logits_QPV)[rows.prompt_B, rows.answer_B]
        entropy_BT = entropy_QP[rows.prompt_B[:, None], prefix_BT].masked_fill(~keep_BT, 0.0)
        return ResponseLogprobs(logprobs_BT, entropy_BT)

    def _rollout(self, rows: WeightedRows) -> Rollout:
        """Return the rows as a scored rollout, with the values of the exact critic."""
        answers, config, (prompt_B, answer_B, _) = self.task.answers, self.method.config, rows
        size = len(prompt_B)
        keep_BT, index = answers.keep_AT[answer_B], (prompt_B, answer_B)
        ids_B1 = torch.zeros((size, 1), dtype=torch.long)
        prompts = PromptBatch(ids_B1, ids_B1 == 0, torch.zeros(keep_BT.shape), [""] * size, step=1)
        responses = Responses(
            answers.tokens_AT[answer_B],
            keep_BT,
            answers.ended_A[answer_B],
            self.sampled_QAT[index],
        )
        reuses = LogprobReuse(config.rollout, config.ppo, self.method.hooks).can_reuse(responses)
        prefix_BT = answers.prefix_AT[answer_B]
        return Rollout(
            prompts,
            responses,
            (self.sampled_QAT if reuses else self.start_QAT)[index],
            self.reference_QAT[index],
            self.values_QP[prompt_B[:, None], prefix_BT].masked_fill(~keep_BT, 0.0),
            self.task.scores_QA[index],
            last_values_B=torch.zeros(size, dtype=torch.float64),
            reuses_logprobs=reuses,
        )

    def _exact_values(self, targets: Targets) -> Tensor:
        """Return the expected return (Q, P) after each prefix under the policy that samples."""
        answers, (prompt_B, answer_B, weights_B) = self.task.answers, self.rows
        keep_BT, gamma = answers.keep_AT[answer_B], self.method.config.ppo.gamma
        rewards_BT = targets.scaled_rewards_BT
        returns_BT = reinforce_pp_advantages(rewards_BT, keep_BT, gamma=gamma).advantages_BT
        prompt_BT, weights_BT = (x[:, None].expand_as(keep_BT) for x in (prompt_B, weights_B))
        index = (prompt_BT[keep_BT], answers.prefix_AT[answer_B][keep_BT])
        empty_QP, weighted_BT = torch.zeros_like(self.values_QP), weights_BT * returns_BT
        sums_QP = empty_QP.index_put(index, weighted_BT[keep_BT], accumulate=True)
        return sums_QP / empty_QP.index_put(index, weights_BT[keep_BT], accumulate=True)
