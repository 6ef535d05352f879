"""PPO on rollouts: generate experience, then learn from it.

Shapes: B = sequences of this rank, T = response tokens, S = tokens of a corpus block.
"""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

import torch

from rlhf.algorithms.advantages import Advantages
from rlhf.algorithms.kl import KlController, guarded_lr_scale
from rlhf.algorithms.streams import stream
from rlhf.config.checks import exact_div
from rlhf.config.ppo_schema import PpoConfig
from rlhf.errors import ConfigError
from rlhf.metrics import Metrics, merge_metrics
from rlhf.phases.context import peak_memory_gib
from rlhf.phases.logprob_reuse import MISMATCH, LogprobReuse, mismatch
from rlhf.phases.ppo_losses import MicroBatchLoss
from rlhf.phases.ppo_metrics import (
    moving_average,
    printed,
    report_values,
    rollout_metrics,
)
from rlhf.phases.ppo_models import Reports
from rlhf.phases.ppo_speed import PerPart
from rlhf.phases.ppo_targets import TargetMaker
from rlhf.phases.ptx import PtxCorpus, learn_from_corpus
from rlhf.phases.rlhf_engine import RLHFEngine
from rlhf.rollout.experience import WholeSequences, by_length, collect, row_parts
from rlhf.types import PromptBatch, Rollout, take_rows


class PpoStats(NamedTuple):
    """What one step of PPO did; losses are means per response token over all its updates."""

    actor_loss: float
    critic_loss: float
    metrics: dict[str, float]


class PPOTrainer:
    """The two halves of a PPO step, on the models of ``engine``.

    Raises:
        ConfigError: ``config.ptx_coef`` asks for a corpus and there is none.
    """

    def __init__(
        self, engine: RLHFEngine, config: PpoConfig, corpus: PtxCorpus | None = None
    ) -> None:
        if config.ptx_coef and corpus is None:
            raise ConfigError(
                f"ppo.ptx_coef={config.ptx_coef}: there is no corpus to learn from; give "
                "PPOTrainer one, or set ppo.ptx_coef=0"
            )
        self.engine = engine
        self.config = config
        self.corpus = corpus
        self.kl = KlController(config.kl_ctl, config.kl_target, config.kl_horizon)
        self.steps_done = 0
        self._targets = TargetMaker(config, engine.ranks)
        self._reuse = LogprobReuse(engine.config.rollout, actor_dropout=config.actor_dropout)
        self._updates_done = 0
        self._seconds = (0.0, 0.0)  # of the last rollout: generating, scoring
        self._with_policy = True
        self._score_average: float | None = None

    def generate_experience(self, prompts: PromptBatch) -> Rollout:
        """Answer the prompts and score the answers with all models that are needed for it."""
        started = time.monotonic()
        responses = self.engine.rollout.generate(self.engine.actor, prompts)
        generated = time.monotonic()
        with_policy = not self._reuse.decide(responses)
        opinions = partial(self.engine.models.opinions, with_policy=with_policy)
        rollout = collect(opinions, prompts, responses, micro_batch_size=self.engine.plan.micro)
        self._seconds = (generated - started, time.monotonic() - generated)
        self._with_policy = with_policy
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
        targets = self._targets(rollout, kl_ctl=self.kl.coefficient)
        metrics = rollout_metrics(rollout, targets, has_critic=self.engine.has_critic)
        learned: Metrics = {}
        reports: list[Reports] = []
        for rows in self._mini_batches(rows_per_rank, mini_batch):
            losses, report = self._update(rollout, targets.advantages, rows)
            change = {name: losses.pop(name) for name in list(losses) if name.startswith(MISMATCH)}
            if not reports:
                metrics |= mismatch(rollout, change)
            learned = merge_metrics(learned, losses)
            reports.append(report)
            if self._has_moved_too_far(losses):
                break
        values = printed(self.engine.ranks.reduce_metrics(metrics | learned))
        values |= report_values(reports) | {"ppo/kl_ctl": self.kl.coefficient}
        values |= self.engine.rollout_metrics
        self._score_average = moving_average(self._score_average, values["ppo/score_mean"])
        values["ppo/score_average"] = self._score_average
        self._reuse.measured(values)
        self.kl = self.kl.step(
            values["ppo/kl_to_reference"], num_sequences=rows_per_rank * self.engine.ranks.size
        )
        self._guard_learning_rate(values)
        self.steps_done += 1
        seconds = PerPart(*self._seconds, train=time.monotonic() - started)
        values |= self.engine.speed.values(rollout, seconds, with_policy=self._with_policy)
        values["memory/peak_gib"] = peak_memory_gib(self.engine.ranks)
        actor_loss, critic_loss = (values.get(f"ppo/{m}_loss", 0.0) for m in ("actor", "critic"))
        return PpoStats(actor_loss, critic_loss, values)

    def _update(
        self, rollout: Rollout, advantages: Advantages, rows: list[int]
    ) -> tuple[Metrics, Reports]:
        """One optimiser step of actor and critic on these rows and those of the other ranks."""
        engine, metrics = self.engine, Metrics()
        trains_actor = self.steps_done >= self.config.actor_freeze_steps
        num_kept = engine.ranks.sum(rollout.responses.keep_BT[rows].sum())
        num_sequences = len(rows) * engine.ranks.size
        rows = by_length(rollout.prompts, rollout.responses, rows)
        for part in row_parts(rows, engine.plan.micro):
            taken = take_rows(rollout, part)
            sequences = WholeSequences(taken.prompts, taken.responses)
            loss = MicroBatchLoss(
                self.config,
                taken,
                take_rows(advantages, part),
                kl_ctl=self.kl.coefficient,
                num_kept=num_kept,
                num_sequences=num_sequences,
            )
            engine.models.learn(
                sequences,
                actor_loss=loss.of_policy if trains_actor else None,
                critic_loss=loss.of_values,
            )
            metrics = merge_metrics(metrics, loss.metrics)
        if trains_actor and self.corpus is not None and self.config.ptx_coef:
            metrics |= learn_from_corpus(
                engine, self.corpus, update=self._updates_done, coefficient=self.config.ptx_coef
            )
        self._updates_done += 1
        return metrics, engine.models.step()

    def _mini_batches(self, rows_per_rank: int, mini_batch: int) -> list[list[int]]:
        """Rows of every update of a rollout: ``ppo_epochs`` shuffled passes."""
        parts = []
        for epoch in range(self.config.ppo_epochs):
            order = torch.randperm(rows_per_rank, generator=self._shuffle(epoch)).tolist()
            parts += [order[i : i + mini_batch] for i in range(0, rows_per_rank, mini_batch)]
        return parts

    def _shuffle(self, epoch: int) -> torch.Generator:
        names = ("mini_batches", self.engine.ranks.rank, self.steps_done, epoch)
        return stream(self.engine.config.seed, *names)

    def _has_moved_too_far(self, losses: Metrics) -> bool:
        """True where KL(old || new) of an update passes stop_update_kl, on all ranks together."""
        limit, key = self.config.stop_update_kl, "ppo/approx_kl"
        if limit is None or key not in losses:
            return False
        return self.engine.ranks.reduce_metrics({key: losses[key]})[key].value() > limit

    def _guard_learning_rate(self, values: dict[str, float]) -> None:
        actor = self.engine.actor
        if self.config.lr_guard_kl is not None and "ppo/approx_kl" in values:
            values["ppo/lr_scale"] = actor.lr_scale
            actor.lr_scale = guarded_lr_scale(
                actor.lr_scale, values["ppo/approx_kl"], limit=self.config.lr_guard_kl
            )
