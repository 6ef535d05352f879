"""Step 2 of InstructGPT, the reward model: it learns to score preferred responses higher."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.reward import (
    RewardLoss,
    build_reward_loss,
    divergence_loss,
    end_loss,
    end_scores,
)
from rlhf.base.intervals import wilson_interval
from rlhf.base.metrics import Mean, Metrics
from rlhf.base.random_streams import seed_for
from rlhf.base.types import PreferenceBatch, ValueModel
from rlhf.config import choices
from rlhf.config.batches import phase_plans
from rlhf.config.choices import LoraRole, Phase
from rlhf.config.roles import Role, adapter_lr
from rlhf.data.batching import pair_steps
from rlhf.data.encoding import Encoder
from rlhf.data.records import Record
from rlhf.data.tokens import Limit, pair_columns
from rlhf.engine.select import build_engine
from rlhf.engine.settings import OptimizerSettings
from rlhf.engine.zero3_partition import build_parameter_placer
from rlhf.models.build import build_scorer, lora_spec, require_enough_positions
from rlhf.phases.shared.checkpoints import Checkpoints
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.exporting import save_trained_model
from rlhf.phases.shared.phase_data import phase_tokens
from rlhf.phases.shared.policies import reward_model_source
from rlhf.phases.shared.supervised import (
    Rows,
    collate_pair_rows,
    local_share,
    measure_held_out,
    run_supervised,
    split_table_rows,
    take_optimizer_step,
)

if TYPE_CHECKING:
    from datasets import Dataset


def run_reward(context: RunContext) -> dict[str, Any]:
    """Train, evaluate and save the reward model; return the phase's entries of result.json."""
    config = context.config.reward
    data = phase_tokens(context, Phase.reward)
    lengths = data.train["length"][:]
    steps = pair_steps(
        data.train["group"][:] if config.group_pairs else range(len(lengths)),
        batch_size=config.batch_size,
        epochs=config.epochs,
        seed=seed_for(context.config.seed, "reward", "shuffle"),
    )
    trainer = RewardTrainer(context, total_steps=len(steps))
    checkpoints = Checkpoints(context, Phase.reward, {"model": trainer.engine})
    if config.eval_every and not checkpoints.is_resumed:
        checkpoints.log_held_out(trainer.evaluate(data.eval).values())

    def train_step(number: int) -> dict[str, float]:
        step = steps[number - 1]
        mine = local_share(
            context,
            list(zip(step.rows, step.weights, strict=True)),
            [lengths[row] for row in step.rows],
            micro=trainer.plan.micro,
        )
        rows, weights = zip(*mine, strict=True)
        return trainer.train_step(
            data.train[list(rows)], list(weights), num_prompts=step.num_prompts
        )

    run_supervised(
        context,
        checkpoints,
        config,
        total_steps=len(steps),
        train_step=train_step,
        evaluate=lambda: trainer.evaluate(data.eval).values(),
    )
    after = trainer.evaluate(data.eval)
    judged = judge_reward_model(
        context, data.eval, lambda pairs: trainer.evaluate(pairs).accuracy.value()
    )
    minimal = judged.get("minimal_pairs", {})
    shares = {f"reward/eval_{kind}": share for kind, share in minimal.items()}
    checkpoints.log_held_out(after.values(), shares)
    save_trained_model(
        context,
        trainer.engine,
        context.run_dir / "reward" / "model",
        source=trainer.source,
        what="A reward model: one label, read at the end token.",
        answers=False,
    )
    trainer.engine.close()
    accuracy = after.accuracy
    return judged | {
        "accuracy": accuracy.value(),
        "accuracy_ci": list(wilson_interval(float(accuracy.total), float(accuracy.count))),
        "steps": checkpoints.step,
        "seconds": checkpoints.elapsed_seconds,
    }


def judge_reward_model(
    context: RunContext, examples: Dataset, accuracy_of: Callable[[Dataset], float]
) -> dict[str, Any]:
    """Return the entries of result.json that require a judge; an empty dict without a judge.

    ``best_possible_accuracy`` is the expected accuracy on the held-out pairs if every response is
    scored with its gold score. ``minimal_pairs`` is, for each kind of flaw, the share of right
    responses that score above a copy with this flaw only: held-out pairs often differ in several.
    """
    if context.judge is None:
        return {}
    from datasets import Dataset

    config = context.config
    held_out = context.parts[Phase.reward].eval
    records = [held_out[row] for row in examples["row"][: config.reward.eval_examples]]
    pairs: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        assert record.prompt is not None
        made = context.judge.minimal_pairs(record.prompt, seed=config.seed)
        for kind, (right, flawed) in made.items():
            pairs[kind].append(Record(prompt=record.prompt, chosen=right, rejected=flawed))
    encoder = Encoder(context.tokenizer, config.data.template)
    limit = Limit("reward.max_tokens", config.reward.max_tokens)
    shares = {}
    for kind, alike in pairs.items():
        columns, _ = pair_columns(list(enumerate(alike)), encoder, limit)
        shares[kind] = accuracy_of(Dataset.from_dict(columns))
    return {
        "best_possible_accuracy": context.judge.best_accuracy(records),
        "minimal_pairs": shares,
    }


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
        self.source = reward_model_source(config)
        self._loss_name = config.reward.loss
        scorer = build_scorer(
            self.source,
            context.tokenizer,
            seed=seed_for(config.seed, "reward_model"),
            lora=lora_spec(config.lora, LoraRole.reward),
            shard=build_parameter_placer(
                Role.reward_training, settings=context.settings, plan=self.plan, ranks=context.ranks
            ),
        )
        require_enough_positions(
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
            optimizer=OptimizerSettings.from_config(
                config.reward,
                total_steps=total_steps,
                adapter_lr=adapter_lr(config.lora, LoraRole.reward),
            ),
        )

    def train_step(self, rows: Rows, weights: list[float], *, num_prompts: int) -> dict[str, float]:
        """Take one step on this rank's share of a global batch, ``rows``; return the metrics.

        The loss is the weighted sum over the pairs of all ranks, divided by ``num_prompts``.
        """
        started = time.monotonic()

        def loss_of(batch: tuple[PreferenceBatch, Tensor]) -> tuple[Tensor, Metrics]:
            pairs, weights_B = batch  # pairs that are repeated as padding have weight 0
            chosen_B, rejected_B, losses_B = self._score_pairs(pairs)
            result = build_reward_loss(losses_B, chosen_B, rejected_B, weights_B)
            return result.loss / num_prompts, _metrics(result)

        max_tokens = self._context.config.reward.max_tokens
        parts = split_table_rows({**rows, "weights": weights}, self.plan.micro)
        batches = (
            (
                collate_pair_rows(self._context, part, max_tokens=max_tokens),
                torch.tensor(part["weights"], device=self._context.ranks.device),
            )
            for part in parts
        )
        metrics, values = take_optimizer_step(
            self._context, Phase.reward, self.engine, batches, loss_of
        )
        loss = metrics["reward/loss"]
        assert isinstance(loss, Mean)
        return values | {"reward/pairs_per_second": int(loss.count) / (time.monotonic() - started)}

    def evaluate(self, examples: Any) -> RewardEvaluation:
        """Return the mean accuracy, loss and scores on held-out pairs."""
        context, config = self._context, self._context.config.reward

        def measure(rows: Rows, keep_B: Tensor) -> Metrics:
            batch = collate_pair_rows(context, rows, max_tokens=config.max_tokens)
            chosen_B, rejected_B, losses_B = self._score_pairs(batch)
            return {
                "accuracy": Mean.of((chosen_B > rejected_B).float(), keep_B),
                "loss": Mean.of(losses_B, keep_B),
                "chosen_score": Mean.of(chosen_B, keep_B),
                "rejected_score": Mean.of(rejected_B, keep_B),
            }

        limit, micro = config.eval_examples, self.plan.micro
        found = measure_held_out(context, self.engine, examples, measure, limit=limit, micro=micro)
        return RewardEvaluation(**{n: m for n, m in found.items() if isinstance(m, Mean)})

    def _score_pairs(self, batch: PreferenceBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return chosen and rejected end scores, and losses (B,), from one pass over both sides."""
        both = batch.concatenate()
        values_BS = self.engine(both.ids_BS)
        chosen_BS, rejected_BS = values_BS.chunk(2)
        chosen_B = end_scores(chosen_BS, batch.chosen.attend_BS)
        rejected_B = end_scores(rejected_BS, batch.rejected.attend_BS)
        if self._loss_name is choices.RewardLossName.end:
            losses_B = end_loss(chosen_B, rejected_B)
        else:
            losses_B = divergence_loss(chosen_BS, rejected_BS, batch)
        return chosen_B, rejected_B, losses_B


def held_out_margins(
    context: RunContext, model: ValueModel, examples: Any, *, micro: int
) -> list[float]:
    """Return the score of the chosen minus the score of the rejected response, for held-out pairs.

    Every rank computes all pairs.
    """
    total = min(len(examples), context.config.reward.eval_examples)
    margins: list[float] = []
    with model.evaluating():
        for start in range(0, total, micro):
            rows = examples[start : min(start + micro, total)]
            batch = collate_pair_rows(context, rows, max_tokens=context.config.reward.max_tokens)
            chosen_BS, rejected_BS = model(batch.concatenate().ids_BS).chunk(2)
            chosen_B = end_scores(chosen_BS, batch.chosen.attend_BS)
            margins += (chosen_B - end_scores(rejected_BS, batch.rejected.attend_BS)).tolist()
    return margins


def _metrics(result: RewardLoss) -> Metrics:
    return {
        "reward/loss": result.mean_loss,
        "reward/accuracy": result.accuracy,
        "reward/margin": result.margin,
        "reward/chosen_score": result.chosen_score,
        "reward/rejected_score": result.rejected_score,
    }
