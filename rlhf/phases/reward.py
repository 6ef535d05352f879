"""Step 2 of InstructGPT, the reward model: it learns to score preferred responses higher."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.reward import (
    RewardLoss,
    divergence_loss,
    end_loss,
    end_scores,
    summarise,
)
from rlhf.config import choices
from rlhf.config.batches import phase_plans
from rlhf.config.choices import LoraRole, Phase
from rlhf.config.roles import Role, reward_model_base
from rlhf.data.batching import pair_steps
from rlhf.data.collate import collate_pairs
from rlhf.engine.select import build_engine
from rlhf.engine.zero3_partition import placer
from rlhf.intervals import wilson_interval
from rlhf.metrics import Mean, Metrics, merge_metrics
from rlhf.models.build import build_scorer, require_positions
from rlhf.models.sources import ModelSource
from rlhf.phases.judged_pairs import judge_reward_model
from rlhf.phases.shared.adapters import adapter_lr, lora_spec
from rlhf.phases.shared.checkpoints import Checkpoints
from rlhf.phases.shared.context import (
    RunContext,
    eval_batches,
    optimizer_settings,
    optimizer_step,
)
from rlhf.phases.shared.exporting import exported
from rlhf.types import PreferenceBatch, ValueModel


def run_reward(context: RunContext) -> dict[str, Any]:
    """Train, evaluate and save the reward model; return the phase's entries of result.json."""
    config = context.config.reward
    data = context.tokens(Phase.reward)
    lengths = data.train["length"][:]
    steps = pair_steps(
        data.train["group"][:] if config.group_pairs else range(len(lengths)),
        batch_size=config.batch_size,
        epochs=config.epochs,
        seed=context.seed("reward", "shuffle"),
    )
    context.warn_of_few_steps("reward", config, steps=len(steps))
    trainer = RewardTrainer(context, total_steps=len(steps))
    checkpoints = Checkpoints(context, Phase.reward, {"model": trainer.engine})
    if config.eval_every and not checkpoints.is_resumed:
        checkpoints.log_held_out(trainer.evaluate(data.eval).values())

    with context.console.progress("reward", len(steps)) as progress:
        for number in checkpoints.steps(len(steps)):
            context.seed_dropout(Phase.reward, number)
            step = steps[number - 1]
            mine = context.share(
                list(zip(step.rows, step.weights, strict=True)),
                [lengths[row] for row in step.rows],
                micro=trainer.plan.micro,
            )
            values = trainer.train_step(
                data.train[[row for row, _ in mine]],
                [weight for _, weight in mine],
                num_prompts=step.num_prompts,
            )
            checkpoints.taken(values)
            progress.advance(number, values)
            if checkpoints.wants_evaluation(config.eval_every):
                checkpoints.evaluated(trainer.evaluate(data.eval).values())

    after = trainer.evaluate(data.eval)
    judged = judge_reward_model(
        context, data.eval, lambda pairs: trainer.evaluate(pairs).accuracy.value()
    )
    minimal = judged.get("minimal_pairs", {})
    shares = {f"reward/eval_{kind}": share for kind, share in minimal.items()}
    checkpoints.log_held_out(after.values(), shares)
    context.save(
        exported(trainer.engine, as_=context.config.lora.export, source=trainer.source),
        context.run_dir / "reward" / "model",
        what="A reward model: one label, read at the end token.",
        answers=False,
    )
    trainer.engine.close()
    accuracy = after.accuracy
    return judged | {
        "accuracy": accuracy.value(),
        "accuracy_ci": list(wilson_interval(float(accuracy.total), float(accuracy.count))),
        "steps": checkpoints.step,
        "seconds": checkpoints.seconds,
    }


def reward_model_source(context: RunContext) -> ModelSource:
    """Return what the reward model starts from: this run's SFT model, or a model of the config."""
    config = context.config
    key, base = reward_model_base(config)
    if key == "model" and Phase.sft in config.phase.order:
        source = ModelSource.folder(context.run_dir / "sft" / "model", base=base)
    else:
        source = ModelSource.of(base, key=key)
    return replace(
        source,
        dropout=config.reward_model.dropout,
        gradient_checkpointing=config.reward_model.gradient_checkpointing,
    )


class WeightedPairs(NamedTuple):
    """Pairs, each with its weight in the sum of the losses; repeated pairs that pad weigh 0."""

    pairs: PreferenceBatch
    weights_B: Tensor


class RewardEvaluation(NamedTuple):
    """Means over held-out pairs."""

    accuracy: Mean
    loss: Mean
    chosen_score: Mean
    rejected_score: Mean

    def values(self) -> dict[str, float]:
        """Return the metrics to log."""
        return {f"reward/eval_{name}": mean.value() for name, mean in self._asdict().items()}


class RewardTrainer:
    """A trainer that takes one optimizer step at a time on preference pairs."""

    def __init__(self, context: RunContext, *, total_steps: int) -> None:
        config, self._context = context.config, context
        self.plan = phase_plans(config)[Phase.reward]
        self.source = reward_model_source(context)
        self._loss_name = config.reward.loss
        scorer = build_scorer(
            self.source,
            context.tokenizer,
            seed=context.seed("reward_model"),
            lora=lora_spec(config.lora, LoraRole.reward),
            shard=placer(
                Role.reward_training, settings=context.settings, plan=self.plan, ranks=context.ranks
            ),
        )
        require_positions(
            scorer.pretrained,
            config.reward.max_tokens,
            key="reward_model",
            wanted="reward.max_tokens",
        )
        self.engine = build_engine(
            scorer,
            role=Role.reward_training,
            settings=context.settings,
            plan=self.plan,
            ranks=context.ranks,
            optimizer=optimizer_settings(
                config.reward,
                total_steps=total_steps,
                adapter_lr=adapter_lr(config.lora, LoraRole.reward),
            ),
        )

    def train_step(
        self, rows: dict[str, list[Any]], weights: list[float], *, num_prompts: int
    ) -> dict[str, float]:
        """Take one step on this rank's share of a global batch, ``rows``; return the metrics.

        The loss is the weighted sum over the pairs of all ranks, divided by ``num_prompts``.
        """
        started = time.monotonic()

        def loss_of(batch: WeightedPairs) -> tuple[Tensor, Metrics]:
            chosen_B, rejected_B, losses_B = self._scores(batch.pairs)
            result = summarise(losses_B, chosen_B, rejected_B, batch.weights_B)
            return result.loss / num_prompts, _metrics(result)

        starts = range(0, len(weights), self.plan.micro)
        batches = (
            WeightedPairs(self._collate(rows, start), self._weights(weights, start))
            for start in starts
        )
        metrics, report = optimizer_step(self.engine, batches, loss_of)
        metrics = self._context.ranks.reduce_metrics(metrics)
        loss = metrics["reward/loss"]
        assert isinstance(loss, Mean)
        return {
            **{name: metric.value() for name, metric in metrics.items()},
            "reward/learning_rate": report.learning_rate,
            "reward/grad_norm": report.grad_norm,
            "reward/skipped_steps": float(report.is_skipped),
            "reward/pairs_per_second": int(loss.count) / (time.monotonic() - started),
        }

    def evaluate(self, examples: Any) -> RewardEvaluation:
        """Return the mean accuracy, loss and scores on held-out pairs."""
        total = min(len(examples), self._context.config.reward.eval_examples)
        parts: Metrics = {}
        with self.engine.evaluating():
            for rows, keep_B in eval_batches(
                total,
                batch_size=self.plan.micro,
                ranks=self._context.ranks,
                lengths=examples["length"][:total],
            ):
                chosen_B, rejected_B, losses_B = self._scores(self._collate(examples[rows]))
                part: Metrics = {
                    "accuracy": Mean.of((chosen_B > rejected_B).float(), keep_B),
                    "loss": Mean.of(losses_B, keep_B),
                    "chosen_score": Mean.of(chosen_B, keep_B),
                    "rejected_score": Mean.of(rejected_B, keep_B),
                }
                parts = merge_metrics(parts, part)
        means = self._context.ranks.reduce_metrics(parts)
        return RewardEvaluation(**{n: m for n, m in means.items() if isinstance(m, Mean)})

    def _collate(self, rows: dict[str, list[Any]], start: int = 0) -> PreferenceBatch:
        part = slice(start, start + self.plan.micro)
        return _collated(self._context, {name: values[part] for name, values in rows.items()})

    def _weights(self, weights: list[float], start: int) -> Tensor:
        part = weights[start : start + self.plan.micro]
        return torch.tensor(part, device=self._context.ranks.device)

    def _scores(self, batch: PreferenceBatch) -> PairScores:
        """Return end scores and losses of the pairs, from one forward pass over both sides."""
        both = batch.both()
        values_BS = self.engine(both.ids_BS)
        chosen_BS, rejected_BS = values_BS.chunk(2)
        chosen_B = end_scores(chosen_BS, batch.chosen.attend_BS)
        rejected_B = end_scores(rejected_BS, batch.rejected.attend_BS)
        if self._loss_name is choices.RewardLossName.end:
            losses_B = end_loss(chosen_B, rejected_B)
        else:
            losses_B = divergence_loss(chosen_BS, rejected_BS, batch)
        return PairScores(chosen_B, rejected_B, losses_B)


def held_out_margins(
    context: RunContext, model: ValueModel, examples: Any, *, micro: int
) -> list[float]:
    """Return the score of the chosen minus that of the rejected response, for each held-out pair.

    For one rank: pairs are not divided.
    """
    total = min(len(examples), context.config.reward.eval_examples)
    margins: list[float] = []
    with model.evaluating():
        for start in range(0, total, micro):
            batch = _collated(context, examples[start : min(start + micro, total)])
            chosen_BS, rejected_BS = model(batch.both().ids_BS).chunk(2)
            chosen_B = end_scores(chosen_BS, batch.chosen.attend_BS)
            margins += (chosen_B - end_scores(rejected_BS, batch.rejected.attend_BS)).tolist()
    return margins


def _collated(context: RunContext, rows: dict[str, list[Any]]) -> PreferenceBatch:
    return collate_pairs(
        rows["chosen_ids"],
        rows["rejected_ids"],
        rows["prompt_tokens"],
        pad_id=context.tokenizer.pad_token_id,
        device=context.ranks.device,
        most=context.config.reward.max_tokens,
    )


class PairScores(NamedTuple):
    """A reward model's end scores and losses (B,) of pairs."""

    chosen_B: Tensor
    rejected_B: Tensor
    losses_B: Tensor


def _metrics(result: RewardLoss) -> Metrics:
    return {
        "reward/loss": result.mean_loss,
        "reward/accuracy": result.accuracy,
        "reward/margin": result.margin,
        "reward/chosen_score": result.chosen_score,
        "reward/rejected_score": result.rejected_score,
    }
