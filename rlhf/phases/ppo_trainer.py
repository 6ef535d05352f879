"""PPO on rollouts: generate experience, then learn from it.

Shapes: B = sequences of this rank, T = response tokens.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.advantages import Advantages, clip_scores, gae, token_rewards
from rlhf.algorithms.kl import KlController, kl_estimate
from rlhf.algorithms.masking import whiten
from rlhf.algorithms.ppo import PolicyLoss, ValueLoss, policy_loss, value_loss
from rlhf.algorithms.streams import stream
from rlhf.config.checks import exact_div
from rlhf.config.ppo_schema import PpoConfig
from rlhf.phases.ppo_metrics import (
    Reports,
    loss_metrics,
    printed,
    report_values,
    rollout_metrics,
)
from rlhf.phases.rlhf_engine import RLHFEngine
from rlhf.rollout.experience import WholeSequences, collect, response_logprobs, response_values
from rlhf.types import Mean, Metrics, Moments, PromptBatch, Rollout, merge_metrics, take_rows


class PpoStats(NamedTuple):
    """What one step of PPO did; losses are means per response token over all its updates."""

    actor_loss: float
    critic_loss: float
    metrics: dict[str, float]


class Losses(NamedTuple):
    """Both losses of one micro-batch."""

    actor: PolicyLoss
    critic: ValueLoss


class PPOTrainer:
    """The two halves of a PPO step, on the models of ``engine``."""

    def __init__(self, engine: RLHFEngine, config: PpoConfig) -> None:
        self.engine = engine
        self.config = config
        self.kl = KlController(config.kl_ctl, config.kl_target, config.kl_horizon)
        self.steps_done = 0
        self._seconds = {"generate": 0.0, "score": 0.0}

    def generate_experience(self, prompts: PromptBatch) -> Rollout:
        """Answer the prompts and score the answers with all four models."""
        started = time.monotonic()
        responses = self.engine.rollout.generate(self.engine.actor, prompts)
        generated = time.monotonic()
        rollout = collect(
            self.engine.models,
            prompts,
            responses,
            temperature=self.engine.sampling.temperature,
            micro_batch_size=self.engine.plan.micro,
        )
        self._seconds = {"generate": generated - started, "score": time.monotonic() - generated}
        return rollout

    def train_rlhf(self, rollout: Rollout) -> PpoStats:
        """Learn from a rollout: ``ppo_epochs`` passes of clipped updates to actor and critic.

        Raises:
            ConfigError: the rollout does not divide into mini-batches.
        """
        started = time.monotonic()
        rows_per_rank, mini_batch = len(rollout.scores_B), self.engine.plan.per_rank
        exact_div(
            rows_per_rank, mini_batch, total_key="rollout", part_key="ppo.mini_batch_size/ranks"
        )
        targets, metrics = self._targets(rollout)
        learned: Metrics = {}
        reports: list[Reports] = []
        for epoch in range(self.config.ppo_epochs):
            order = torch.randperm(rows_per_rank, generator=self._shuffle(epoch))
            for first in range(0, rows_per_rank, mini_batch):
                rows = order[first : first + mini_batch].tolist()
                losses, report = self._update(rollout, targets, rows)
                learned = merge_metrics(learned, losses)
                reports.append(report)
        values = printed(self.engine.ranks.reduce_metrics(metrics | learned))
        values |= report_values(reports) | {"ppo/kl_ctl": self.kl.coefficient}
        self.kl = self.kl.step(
            values["ppo/kl_to_reference"], num_sequences=rows_per_rank * self.engine.ranks.size
        )
        self.steps_done += 1
        values |= self._timings(rollout, train=time.monotonic() - started)
        return PpoStats(values["ppo/actor_loss"], values["ppo/critic_loss"], values)

    def _targets(self, rollout: Rollout) -> tuple[Advantages, Metrics]:
        """Advantages and returns, fixed before the first update and used by all of them."""
        config, keep_BT = self.config, rollout.responses.keep_BT
        logprobs_BT, reference_BT = rollout.logprobs_BT, rollout.reference_logprobs_BT
        scores_B = clip_scores(
            rollout.scores_B,
            rollout.responses.ended_B,
            clip=config.clip_reward_value,
            missing_end_penalty=config.missing_end_penalty,
        )
        kl_BT = kl_estimate(logprobs_BT, reference_BT, estimator=config.kl_estimator.value)
        shaped_BT = token_rewards(kl_BT, scores_B, keep_BT, kl_ctl=self.kl.coefficient)
        rewards_BT = shaped_BT
        if config.whiten_rewards:
            rewards_BT = self._whiten(shaped_BT, keep_BT, shift_mean=False)
        targets = gae(rewards_BT, rollout.values_BT, keep_BT, gamma=config.gamma, lam=config.lam)
        metrics = rollout_metrics(rollout, shaped_BT, *targets)
        if config.whiten_advantages:
            whitened_BT = self._whiten(targets.advantages_BT, keep_BT, shift_mean=True)
            targets = targets._replace(advantages_BT=whitened_BT)
        return targets, metrics

    def _update(
        self, rollout: Rollout, targets: Advantages, rows: list[int]
    ) -> tuple[Metrics, Reports]:
        """One optimiser step of actor and critic on these rows and those of the other ranks."""
        micro, metrics = self.engine.plan.micro, Metrics()
        actor_report = critic_report = None
        num_kept = self.engine.ranks.sum(rollout.responses.keep_BT[rows].sum())
        for first in range(0, len(rows), micro):
            part = rows[first : first + micro]
            losses, entropy = self._losses(take_rows(rollout, part), take_rows(targets, part))
            self.engine.actor.backward(losses.actor.loss / num_kept)
            actor_report = self.engine.actor.step()
            self.engine.critic.backward(losses.critic.loss / num_kept)
            critic_report = self.engine.critic.step()
            metrics = merge_metrics(metrics, loss_metrics(*losses, entropy))
        assert actor_report is not None, "the plan's micro-batches make exactly one optimiser step"
        assert critic_report is not None
        return metrics, Reports(actor_report, critic_report)

    def _losses(self, rollout: Rollout, targets: Advantages) -> tuple[Losses, Mean]:
        """Both losses of one micro-batch, and the actor's entropy."""
        engine, keep_BT = self.engine, rollout.responses.keep_BT
        sequences = WholeSequences(rollout.prompts, rollout.responses)
        policy = response_logprobs(engine.actor, sequences, temperature=engine.sampling.temperature)
        actor = policy_loss(
            policy.logprobs_BT,
            rollout.logprobs_BT,
            targets.advantages_BT,
            keep_BT,
            cliprange=self.config.cliprange,
        )
        critic = value_loss(
            response_values(engine.critic, sequences),
            rollout.values_BT,
            targets.returns_BT,
            keep_BT,
            cliprange_value=self.config.cliprange_value,
        )
        return Losses(actor, critic), Mean.of(policy.entropy_BT, keep_BT)

    def _whiten(self, x_BT: Tensor, keep_BT: Tensor, *, shift_mean: bool) -> Tensor:
        moments = self.engine.ranks.reduce_metrics({"x": Moments.of(x_BT, keep_BT)})["x"]
        assert isinstance(moments, Moments)
        return whiten(x_BT, keep_BT, moments, shift_mean=shift_mean)

    def _shuffle(self, epoch: int) -> torch.Generator:
        names = ("mini_batches", self.engine.ranks.rank, self.steps_done, epoch)
        return stream(self.engine.config.seed, *names)

    def _timings(self, rollout: Rollout, *, train: float) -> dict[str, float]:
        tokens = rollout.prompts.attend_BP.sum() + rollout.responses.keep_BT.sum()
        step = train + sum(self._seconds.values())
        return {
            "time/generate_seconds": self._seconds["generate"],
            "time/score_seconds": self._seconds["score"],
            "time/train_seconds": train,
            "time/step_seconds": step,
            "speed/tokens_per_second": float(self.engine.ranks.sum(tokens)) / step,
        }
