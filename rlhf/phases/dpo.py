"""DPO: the SFT model learns from preferences directly, without reward model and rollouts.

Shapes: B = pairs, S = tokens of whole sequences.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.dpo import DpoLoss, dpo_loss, sequence_logprobs
from rlhf.algorithms.logprobs import Picks, Reading
from rlhf.algorithms.reward import wilson_interval
from rlhf.algorithms.streams import Shuffle
from rlhf.config.checks import phase_plans
from rlhf.config.choices import LoraRole, Phase
from rlhf.config.roles import Role
from rlhf.data.collate import collate_pairs
from rlhf.data.tokens import TokenData
from rlhf.engine.build import AnyEngine, build_engine
from rlhf.engine.partitioning import partitioner
from rlhf.metrics import Mean, Metrics, merge_metrics
from rlhf.models.building import require_positions
from rlhf.phases.adapters import adapter_lr
from rlhf.phases.context import (
    RunContext,
    eval_batches,
    optimizer_settings,
    optimizer_step,
    peak_memory_gib,
)
from rlhf.phases.exporting import exported
from rlhf.phases.policies import build_policy, build_reference, rollout_backend
from rlhf.phases.policy_evaluation import AnsweringPolicy, HeldOutPrompts, evaluate_policy
from rlhf.phases.ppo_models import AdapterOff
from rlhf.phases.sources import policy_source
from rlhf.rollout.experience import (
    Opinions,
    WholeSequences,
    language_logprobs,
    response_logprobs,
)
from rlhf.types import Model, PreferenceBatch


def run_dpo(context: RunContext) -> dict[str, Any]:
    """Train, evaluate and save the policy; returns the phase's result."""
    config, started = context.config.dpo, time.monotonic()
    data = context.tokens(Phase.dpo, batch_size=config.batch_size, key="dpo.batch_size")
    held_out = held_out_prompts(context)
    total_steps = math.ceil(len(data.train) * config.epochs / config.batch_size)
    trainer = DpoTrainer(context, total_steps=total_steps)
    result = _answers(context, trainer, held_out, "before")

    shuffle = Shuffle(len(data.train), seed=context.seed("dpo", "shuffle"))
    context.warn_of_few_steps("dpo", config, steps=total_steps)
    with context.console.progress("dpo", total_steps) as progress:
        for step in range(1, total_steps + 1):
            values = trainer.train_step(data.train[shuffle.batch(step - 1, config.batch_size)])
            context.tracker.log("dpo", step, values)
            progress.advance(step, values)
            if config.eval_every and step % config.eval_every == 0 and step < total_steps:
                context.tracker.log("dpo", step, _printed(*trainer.evaluate(data.eval)))

    accuracy, eval_loss = trainer.evaluate(data.eval)
    context.tracker.log("dpo", total_steps, _printed(accuracy, eval_loss))
    result |= _answers(context, trainer, held_out, "after")
    export = exported(
        trainer.policy, as_=context.config.lora.export, source=policy_source(context.config)
    )
    context.save(export, context.run_dir / "dpo" / "actor", what="A language model after DPO.")
    trainer.close()
    return result | {
        "accuracy": accuracy.value(),
        "accuracy_ci": list(wilson_interval(float(accuracy.total), float(accuracy.count))),
        "kl_to_reference": result["kl_after"],
        "steps": total_steps,
        "seconds": time.monotonic() - started,
        "peak_memory_gib": peak_memory_gib(context.ranks),
    }


def held_out_prompts(context: RunContext) -> HeldOutPrompts:
    """Held-out prompts of PPO's part, or of the pairs where PPO has no part."""
    phase = Phase.ppo if context.parts[Phase.ppo].eval else Phase.reward
    data: TokenData = context.prompts(phase)
    return HeldOutPrompts(data.eval, context.parts[phase].eval)


def _printed(accuracy: Mean, loss: Mean) -> dict[str, float]:
    return {"dpo/eval_accuracy": accuracy.value(), "dpo/eval_loss": loss.value()}


def _answers(
    context: RunContext, trainer: DpoTrainer, held_out: HeldOutPrompts, when: str
) -> dict[str, Any]:
    """Return how the policy answers, as entries of result.json."""
    num_prompts = context.config.dpo.eval_prompts
    answers = evaluate_policy(context, trainer.answering, held_out, num_prompts=num_prompts)
    result = answers.result(when)
    del result[f"score_{when}"]  # no reward model
    return result


class PairLogprobs(NamedTuple):
    """Log-probabilities (B,) of both responses of pairs."""

    chosen_B: Tensor
    rejected_B: Tensor


class DpoTrainer:
    """One optimiser step at a time on pairs of one rank."""

    def __init__(self, context: RunContext, *, total_steps: int) -> None:
        config, tokenizer = context.config, context.tokenizer
        self._context = context
        self._plan = phase_plans(config)[Phase.dpo]
        shared: Any = {"settings": context.settings, "plan": self._plan, "ranks": context.ranks}
        shard = partitioner(Role.actor, **shared)
        module = build_policy(config, tokenizer, dropout=0.0, shard=shard)
        require_positions(
            module.pretrained, config.dpo.max_tokens, key="model", wanted="dpo.max_tokens"
        )
        lr = adapter_lr(config.lora, LoraRole.actor)
        settings = optimizer_settings(config.dpo, total_steps=total_steps, adapter_lr=lr)
        self.policy = build_engine(module, role=Role.actor, optimizer=settings, **shared)
        self._reference: Model = AdapterOff(self.policy)
        self._copy: AnyEngine | None = None
        copy = build_reference(config, tokenizer, shard=partitioner(Role.reference, **shared))
        if copy is not None:
            self._reference = self._copy = build_engine(copy, role=Role.reference, **shared)
        rollout = config.rollout
        temperature = rollout.eval_temperature or rollout.temperature
        self._sampling, self._greedy = (
            rollout_backend(
                config,
                tokenizer,
                temperature=temperature,
                dtype=context.settings.dtype,
                ranks=context.ranks,
                greedy=greedy,
            )
            for greedy in (False, True)
        )

    @property
    def answering(self) -> AnsweringPolicy:
        """The policy as evaluations see it."""
        return AnsweringPolicy(
            self.policy, self._sampling, self._greedy, self._opinions, self._plan.micro
        )

    def train_step(self, rows: dict[str, list[Any]]) -> dict[str, float]:
        """Learn from this rank's share of one global batch; returns the step's metrics."""
        started, context = time.monotonic(), self._context
        num_pairs, micro = len(rows["chosen_ids"]), self._plan.micro
        mine = context.share(range(num_pairs), rows["length"], micro=micro)

        def loss_of(batch: PreferenceBatch) -> tuple[Tensor, Metrics]:
            result = self._loss(batch)
            return result.loss / num_pairs, _metrics(result)

        batches = (self._collate(rows, mine[i : i + micro]) for i in range(0, len(mine), micro))
        metrics, report = optimizer_step(self.policy, batches, loss_of)
        metrics = context.ranks.reduce_metrics(metrics)
        return {
            **{name: metric.value() for name, metric in metrics.items()},
            "dpo/learning_rate": report.learning_rate,
            "dpo/grad_norm": report.grad_norm,
            "dpo/pairs_per_second": num_pairs / (time.monotonic() - started),
        }

    def evaluate(self, examples: Any) -> tuple[Mean, Mean]:
        """Accuracy of the implicit rewards, and loss, on held-out pairs."""
        config, ranks = self._context.config.dpo, self._context.ranks
        total = min(len(examples), config.eval_examples)
        metrics: Metrics = {}
        with self.policy.evaluating():
            for rows, keep_B in eval_batches(
                total,
                batch_size=self._plan.micro,
                ranks=ranks,
                lengths=examples["length"][:total],
            ):
                batch = self._collate(examples[rows], list(range(len(rows))))
                result = self._loss(batch, keep_B)
                part: Metrics = {"accuracy": result.accuracy, "loss": result.mean_loss}
                metrics = merge_metrics(metrics, part)
        metrics = ranks.reduce_metrics(metrics)
        accuracy, loss = metrics["accuracy"], metrics["loss"]
        assert isinstance(accuracy, Mean)
        assert isinstance(loss, Mean)
        return accuracy, loss

    def close(self) -> None:
        """Free what DeepSpeed holds."""
        self.policy.close()
        if self._copy is not None:
            self._copy.close()

    def _collate(self, rows: dict[str, list[Any]], taken: list[int]) -> PreferenceBatch:
        return collate_pairs(
            [rows["chosen_ids"][row] for row in taken],
            [rows["rejected_ids"][row] for row in taken],
            [rows["prompt_tokens"][row] for row in taken],
            pad_id=self._context.tokenizer.pad_token_id,
            device=self._context.ranks.device,
        )

    def _loss(self, batch: PreferenceBatch, keep_B: Tensor | None = None) -> DpoLoss:
        with self._reference.evaluating():
            reference = _pair_logprobs(self._reference, batch)
        policy = _pair_logprobs(self.policy, batch)
        parts = [*policy, *reference]
        if keep_B is not None:
            parts = [part_B[keep_B] for part_B in parts]
        config = self._context.config.dpo
        return dpo_loss(
            *parts,
            beta=config.beta,
            label_smoothing=config.label_smoothing,
            loss=config.loss.value,
        )

    def _opinions(self, sequences: WholeSequences) -> Opinions:
        """Policy and reference; DPO has no critic and no reward model."""
        reading = Reading(self._context.config.rollout.temperature, with_entropy=False)
        with self.policy.evaluating():
            policy = response_logprobs(self.policy, sequences, reading)
        with self._reference.evaluating():
            reference = response_logprobs(self._reference, sequences, reading)
        nothing_BT = torch.zeros_like(policy.logprobs_BT)
        return Opinions(policy.logprobs_BT, reference.logprobs_BT, nothing_BT, nothing_BT[:, 0])


def _pair_logprobs(model: Model, batch: PreferenceBatch) -> PairLogprobs:
    """One pass over both sides."""
    both = batch.both()
    logprobs_N, rows_N = language_logprobs(model, both), Picks.of(both).rows_N
    logprobs_B = sequence_logprobs(logprobs_N, rows_N, num_rows=len(both.ids_BS))
    return PairLogprobs(*logprobs_B.chunk(2))


def _metrics(result: DpoLoss) -> Metrics:
    return {
        "dpo/loss": result.mean_loss,
        "dpo/accuracy": result.accuracy,
        "dpo/margin": result.margin,
        "dpo/chosen_reward": result.chosen_reward,
        "dpo/rejected_reward": result.rejected_reward,
    }
