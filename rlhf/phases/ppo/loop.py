"""Step 3 of InstructGPT, PPO: the SFT model learns to answer as the reward model prefers.

``run_ppo`` is the phase. ``PPOTrainer`` holds one PPO step in six numbered parts, as in
https://arxiv.org/abs/1707.06347 and https://arxiv.org/abs/2203.02155: 1 sample, 2 score,
3 rewards and advantages, 4 clipped updates, 5 KL controller, 6 log. Parts 1 and 2 make a
``Rollout`` (rlhf/base/types.py): for each response its tokens, the log-probs of the policy and the
reference, the critic's values, and one score; rlhf/phases/shared/scoring.py computes all but the
tokens, in micro-batches. Statistics over all ranks are ``Moments``: sums of values, of squares and
of counts, which add up exactly however the rows are divided.

What differs from the papers by default, and why: the log-probs that sampling returned replace a
forward pass, as long as training measures nearly the same (rollout.max_logprob_mismatch);
advantages are whitened over all ranks, and losses divided by the tokens of the whole mini-batch, so
that no number of ranks or micro-batches changes a gradient; values are not clipped, which did not
help in https://arxiv.org/abs/2006.05990; a response without an end token is penalised, as a reward
model has seen few; and mixture training is off (``ppo.ptx_coef``).

Shapes: B = sequences of this rank, T = response tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from rlhf.algorithms.entropy import EntropyController
from rlhf.algorithms.kl import KlController, adapt_lr_scale
from rlhf.base.metrics import Metrics, accumulate_metrics
from rlhf.base.random_streams import random_stream, seed_dropout
from rlhf.base.types import PromptBatch, Rollout, StepReport, TokenTargets
from rlhf.config.batches import divide_exactly
from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.engine.devices import peak_memory_gib
from rlhf.options import PpoConfig
from rlhf.phases.ppo.evaluation import PpoEvaluation, save_models
from rlhf.phases.ppo.hooks import PpoHook, build_hooks
from rlhf.phases.ppo.logprob_reuse import LogprobReuse
from rlhf.phases.ppo.models import step_optimizers_together
from rlhf.phases.ppo.objective import (
    SURROGATES,
    Aggregation,
    Objective,
    cut_micro_batches,
    deal_mini_batch,
    gather_rollout,
    learned_mask,
)
from rlhf.phases.ppo.prompts import PromptLoader
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.phases.ppo.step_metrics import (
    PpoStats,
    early_end_reason,
    num_optimizer_steps,
    rollout_metrics,
    rollout_numbers,
    update_score_average,
    values_to_log,
)
from rlhf.phases.ppo.targets import TargetMaker
from rlhf.phases.shared.checkpoints import Checkpoints
from rlhf.phases.shared.context import RunContext, phase_tokens
from rlhf.phases.shared.scoring import score_responses, split_rows

MOST_HISTOGRAMS = 50  # steps of a run whose scores, lengths, KL and advantages trackers show


def run_ppo(context: RunContext) -> dict[str, Any]:
    """Train, evaluate and save actor and critic; return the phase's entries of result.json."""
    config, data = context.config.ppo, phase_tokens(context, Phase.ppo)
    assert config.steps is not None, "count_ppo_steps sets config.ppo.steps"
    hooks = build_hooks(context.config, context)
    engine = RLHFEngine(context.config, context.ranks)
    for close in (engine.close, *(hook.close for hook in hooks)):
        context.opened.callback(close)
    trainer = PPOTrainer(engine, config, hooks)
    loader = PromptLoader(context, data.train)
    evaluation = PpoEvaluation(context, engine, data.eval, hooks)
    stored = engine.trained_engines
    for hook in hooks:
        stored |= hook.prepare(trainer, loader)
    checkpoints = Checkpoints(context, Phase.ppo, stored, trainer)
    if checkpoints.is_resumed:
        evaluation.restore_held_out_values()
    else:
        checkpoints.results = evaluation.evaluate_for_result("before", log=checkpoints.log_held_out)
        evaluation.write_samples(trainer.held_out_targets, step=0)

    with context.console.progress("ppo", config.steps) as progress:
        for step in checkpoints.steps(config.steps):
            rollout = trainer.generate_experience(loader.own_prompts(step - 1))
            values: dict[str, float] = {}
            for hook in hooks:
                rollout, hook_values = hook.prepare_rollout(trainer, rollout)
                values |= hook_values
            stats = trainer.train_rlhf(rollout)
            values |= stats.metrics
            checkpoints.log_step(values, optimizer_steps=num_optimizer_steps(values))
            if context.ranks.is_main and step % -(-config.steps // MOST_HISTOGRAMS) == 0:
                spread = rollout_numbers(rollout, stats.targets)
                context.tracker.histograms(Phase.ppo, step, spread)
            progress.advance(step, values)
            if (reason := early_end_reason(config, values)) is not None:
                checkpoints.end_after_this_step(reason)
            if checkpoints.is_evaluation_due(config.eval_every):
                is_frozen = step <= config.actor_freeze_steps
                checkpoints.log_evaluation(evaluation.evaluate().metrics(), is_frozen=is_frozen)
            if step % config.sample_every == 0 and not checkpoints.is_last_step:
                evaluation.write_samples(trainer.held_out_targets, step=step)

    evaluation.write_samples(
        trainer.held_out_targets, step=checkpoints.step, ends_with=checkpoints.models_step
    )
    result = checkpoints.results | evaluation.evaluate_for_result(
        "after", log=checkpoints.log_held_out
    )
    save_models(context, engine, evaluation.variants)
    for variant in evaluation.variants:
        with variant.swap_in():
            result |= evaluation.evaluate_for_result(f"after_{variant.name}")
    result |= {"kl_to_reference": result["kl_after"], **checkpoints.totals()}
    return result | {"peak_memory_gib": peak_memory_gib(context.ranks)}


class PPOTrainer:
    """PPO on the models of an ``RLHFEngine``: generate experience, then learn from it.

    If ``hooks`` is None, the hooks of the options and methods in use are built.
    """

    def __init__(
        self, engine: RLHFEngine, config: PpoConfig, hooks: Sequence[PpoHook] | None = None
    ) -> None:
        self.engine = engine
        self.config = config
        self.hooks = build_hooks(replace(engine.config, ppo=config)) if hooks is None else hooks
        self.kl = KlController(config.kl_ctl, config.kl_target, config.kl_horizon)
        self.entropy = EntropyController(
            config.entropy_coef, config.entropy_target, config.entropy_coef_step
        )
        self.steps_done = 0
        self.updates_done = 0
        self.target_maker = TargetMaker(config, engine.ranks, engine.config.rewards, self.hooks)
        self._reuse = LogprobReuse(engine.config.rollout, config, self.hooks, engine.actor.module)
        self._score_average: float | None = None

    def generate_experience(self, prompts: PromptBatch) -> Rollout:
        """Return scored responses to ``prompts``: parts 1 and 2 of a PPO step."""
        engine, started = self.engine, time.monotonic()
        # 1. Sample responses with the current policy.
        responses = engine.rollout.generate(engine.actor, prompts)
        sampled = time.monotonic()
        # 2. Score the responses: log-probs of policy and reference, values, reward-model scores.
        micro, can_reuse = engine.plan.micro, self._reuse.can_reuse(responses)
        rollout = score_responses(
            engine.models, prompts, responses, micro_batch_size=micro, with_policy=not can_reuse
        )
        for hook in self.hooks:
            rollout = hook.annotate_scored_rollout(self, rollout)
        seconds = {"generate": sampled - started, "score": time.monotonic() - sampled}
        return rollout._replace(seconds=seconds)

    def train_rlhf(self, rollout: Rollout) -> PpoStats:
        """Train on a rollout and return the metrics of the step: parts 3 to 6 of a PPO step.

        Raises:
            ConfigError: if the rollout does not divide into mini-batches.
        """
        started, engine, config = time.monotonic(), self.engine, self.config
        ranks, max_tokens = engine.ranks, engine.config.max_policy_tokens
        seed_dropout(engine.config.seed, "ppo", self.steps_done, rank=ranks.rank)
        # 3. Rewards (scores minus the KL penalty) and advantages, which all updates share.
        kl_ctl = self.kl.coefficient
        self.target_maker.update_moments(rollout)
        targets = self.target_maker.make(rollout, kl_ctl=kl_ctl)

        # 4. Clipped updates: passes over shuffled mini-batches, each cut into micro-batches.
        gathered, advantages = gather_rollout(rollout, targets.advantages, ranks)
        learned_BT = learned_mask(config, gathered)
        surrogate = SURROGATES[config.surrogate]
        for hook in self.hooks:
            surrogate = hook.change_surrogate(surrogate)
        update_metrics: Metrics = {}  # of all updates
        updates: list[dict[Role, StepReport]] = []
        for rows in self._mini_batch_rows(gathered):
            micro = engine.plan.micro
            batches = cut_micro_batches(config, gathered, advantages, rows, micro, ranks.device)
            keep_BT = learned_BT[rows]
            mean = Aggregation.build_for_mini_batch(config, keep_BT, ranks, max_tokens=max_tokens)
            can_measure = self._reuse.can_measure_mismatch(rollout, updates)
            objective = Objective(config, surrogate, kl_ctl, self.entropy.weight, mean, can_measure)
            update: Metrics = {}
            reports: dict[Role, StepReport] = {}
            for learners in engine.models.learner_groups(trains_actor=self.trains_actor):
                for learner, batch in product(learners, batches):
                    # This calls objective.critic_loss or objective.actor_loss, by way of models.py.
                    loss, metrics = learner.loss(batch, objective)
                    learner.engine.backward(loss)
                    update = accumulate_metrics(update, metrics)
                for hook in self.hooks:
                    update |= hook.add_gradient(self, learners)
                reports |= step_optimizers_together(learners)
            updates.append(reports)
            self.updates_done += 1
            update_metrics = accumulate_metrics(update_metrics, update)
            if self._exceeds_update_kl(update):
                break

        # 5. Steer the KL coefficient of the next rollout.
        part_names = engine.config.rewards
        measured = rollout_metrics(rollout, targets, part_names, has_critic=engine.has_critic)
        measured |= self._reuse.mismatch_metrics(rollout)
        values = values_to_log(ranks.reduce_metrics(measured | update_metrics), updates)
        num_sequences = len(rollout.scores_B) * ranks.size
        self.kl = self.kl.adapt_to_kl(values["ppo/kl_to_reference"], num_sequences=num_sequences)
        # 6. Log the step's metrics.
        values |= {"ppo/kl_ctl": kl_ctl} | self._finish_step(values)
        values |= engine.speed.metrics(rollout, values, train_seconds=time.monotonic() - started)
        values |= engine.constant_metrics | {"memory/peak_gib": peak_memory_gib(ranks)}
        losses = values.get("ppo/actor_loss", 0.0), values.get("ppo/critic_loss", 0.0)
        return PpoStats(*losses, values, targets)

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer state that later steps need, without the models, as JSON values."""
        return {
            "steps_done": self.steps_done,
            "updates_done": self.updates_done,
            "kl_coefficient": self.kl.coefficient,
            "entropy": [self.entropy.coefficient, self.entropy.is_above],
            "score_average": self._score_average,
            "mismatch": self._reuse.mismatch,
            "score_moments": self.target_maker.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the trainer state from what ``state_dict`` returned."""
        self.steps_done, self.updates_done = state["steps_done"], state["updates_done"]
        self.kl = replace(self.kl, coefficient=state["kl_coefficient"])
        if "entropy" in state:  # checkpoints of older versions have none
            coefficient, is_above = state["entropy"]
            self.entropy = replace(self.entropy, coefficient=coefficient, is_above=is_above)
        self._score_average = state["score_average"]
        self._reuse.mismatch = state["mismatch"]
        self.target_maker.load_state_dict(state["score_moments"])

    def held_out_targets(self, rollout: Rollout) -> TokenTargets | None:
        """Return the rewards and advantages of answers to held-out prompts; None without GAE."""
        return self.target_maker.held_out_targets(rollout, kl_ctl=self.kl.coefficient)

    @property
    def trains_actor(self) -> bool:
        """Return False in the first ``actor_freeze_steps`` steps, when only the critic learns."""
        return self.steps_done >= self.config.actor_freeze_steps

    def _mini_batch_rows(self, rollout: Rollout) -> Iterator[list[int]]:
        """Yield this rank's rows of each mini-batch: ``ppo_epochs`` passes, each reshuffled.

        ``rollout`` has the rows of all ranks; its mini-batches are the same on any number of ranks.
        """
        plan, ranks, total = self.engine.plan, self.engine.ranks, len(rollout.scores_B)
        size = plan.per_rank * ranks.size
        divide_exactly(total, size, total_key="rollout", part_key="ppo.mini_batch_size")
        for epoch in range(self.config.ppo_epochs):
            stream = ("mini_batches", 0, self.steps_done, epoch)
            shuffle = random_stream(self.engine.config.seed, *stream)
            for rows in split_rows(torch.randperm(total, generator=shuffle).tolist(), size):
                yield deal_mini_batch(rollout, rows, ranks, micro=plan.micro)

    def _exceeds_update_kl(self, update: Metrics) -> bool:
        """Return True if KL(sampler || policy), over all ranks, is above ppo.stop_update_kl."""
        limit, key = self.config.stop_update_kl, "ppo/sampler_kl"
        if limit is None or key not in update:
            return False
        return self.engine.ranks.reduce_metrics({key: update[key]})[key].value() > limit

    def _finish_step(self, values: Mapping[str, float]) -> dict[str, float]:
        """Count the step, call the hooks' finish_step, adapt controllers; return values to log."""
        actor, limit = self.engine.actor, self.config.lr_guard_kl
        self.steps_done += 1
        for hook in self.hooks:
            hook.finish_step(self)
        self._reuse.store_mismatch(values)
        self._score_average = update_score_average(self._score_average, values["ppo/score_mean"])
        logged = {"ppo/score_average": self._score_average}
        if self.entropy.target is not None and "ppo/entropy" in values:
            logged["ppo/entropy_coef"] = self.entropy.weight
            self.entropy = self.entropy.adapt_to_entropy(values["ppo/entropy"])
        if limit is not None and "ppo/approx_kl" in values:
            logged["ppo/lr_scale"] = actor.lr_scale
            kl = values["ppo/approx_kl"]
            actor.lr_scale = adapt_lr_scale(actor.lr_scale, kl, limit=limit)
        return logged
