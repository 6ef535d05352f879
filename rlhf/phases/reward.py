"""Step 2 of InstructGPT, the reward model: it learns to score preferred responses higher.

Shapes: B = pairs or responses, S = tokens of whole sequences, M = scores per response (1, unless an
option trains several models), N = held-out responses.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from rlhf.algorithms.ranking import measure_ranking
from rlhf.algorithms.reward import (
    build_reward_loss,
    classification_loss,
    divergence_loss,
    end_loss,
    end_scores,
    regression_loss,
)
from rlhf.base.metrics import Mean, Metrics, loss_metrics
from rlhf.base.random_streams import seed_for
from rlhf.base.types import PreferenceBatch
from rlhf.config.batches import batch_plans
from rlhf.config.choices import Phase, RewardLossName, Unpaired
from rlhf.config.roles import Role
from rlhf.data.collate import PairStep, collate_sequences, divide_pairs_into_steps
from rlhf.data.encoding import Encoder
from rlhf.data.pair_numbers import CHOSEN_SCORE, MARGIN, REJECTED_SCORE, read_pair_groups
from rlhf.data.records import Record
from rlhf.data.tokens import Limit, pair_columns
from rlhf.engine.select import AnyEngine, build_engine
from rlhf.engine.settings import optimizer_settings
from rlhf.engine.zero3_partition import build_parameter_placer
from rlhf.methods import Part, classes_of, methods_in_use
from rlhf.models.build import build_scorer, find_model_extensions, require_enough_positions
from rlhf.models.language_model import Scorer
from rlhf.options import RewardConfig
from rlhf.phases.reward_evaluation import RewardEvaluation, measure_scores
from rlhf.phases.shared.checkpoints import Checkpoints
from rlhf.phases.shared.context import RunContext, reward_pairs
from rlhf.phases.shared.exporting import computing_as_saved, save_trained_model
from rlhf.phases.shared.policies import reward_model_source
from rlhf.phases.shared.supervised import (
    Rows,
    collate_pair_rows,
    held_out_values,
    measure_held_out,
    run_supervised,
    share_of_this_rank,
    split_table_rows,
    take_optimizer_steps,
)

if TYPE_CHECKING:
    from datasets import Dataset


def run_reward(context: RunContext) -> dict[str, Any]:
    """Train, evaluate and save the reward model; return the phase's entries of result.json."""
    config = context.config.reward
    groups = read_pair_groups(config.groups_path)
    train, held_out = reward_pairs(context)
    lengths = train["length"][:]
    trainer = build_trainer(context, train)
    context.opened.callback(trainer.close)
    checkpoints = Checkpoints(context, Phase.reward, trainer.engines)
    if config.eval_every and not checkpoints.is_resumed:
        checkpoints.log_held_out(trainer.evaluate(held_out).metrics())

    def train_step(number: int) -> dict[str, float]:
        step = trainer.steps[number - 1]
        own_pairs = share_of_this_rank(
            context,
            list(zip(step.rows, step.weights, strict=True)),
            [lengths[row] for row in step.rows],
            micro=trainer.plan.micro,
        )
        pairs, weights = zip(*own_pairs, strict=True)
        rows = train[list(pairs)]
        return trainer.train_step(number, pairs, rows, weights, num_prompts=step.num_prompts)

    run_supervised(
        context,
        checkpoints,
        config,
        total_steps=len(trainer.steps),
        train_step=train_step,
        evaluate=lambda: trainer.evaluate(held_out).metrics(),
    )
    after = trainer.evaluate(held_out)
    measured = _judge_and_group_results(context, trainer, held_out, groups)
    minimal = measured.get("minimal_pairs", {})
    shares = {f"reward/eval_{flaw}": share for flaw, share in minimal.items()}
    checkpoints.log_held_out(after.metrics(), shares)
    ids = held_out["ids" if config.unpaired else "chosen_ids"][:]
    with trainer.swap_in_final_weights():
        save_trained_model(
            context,
            trainer.engines["model"],
            context.run_dir / "reward" / "model",
            source=trainer.source,
            what="A reward model: one label, read at the end token.",
            answers=False,
            example=context.tokenizer.decode(min(ids, key=len)),
            write_more=trainer.build_extra_writer(after),
        )
    return measured | trainer.results(after) | checkpoints.totals()


def _judge_and_group_results(
    context: RunContext,
    trainer: RewardTrainer,
    held_out: Dataset,
    groups: Mapping[str, list[Record]],
) -> dict[str, Any]:
    """Return results from the judge, if the run has one, and the accuracy on each of ``groups``.

    ``best_possible_accuracy`` is the expected accuracy on the held-out pairs if every response is
    scored with its gold score; ``pair_accuracy`` (with reward.unpaired) is the model's accuracy.
    ``minimal_pairs`` is, for each kind of flaw, the share of right responses that score above a
    copy with only this flaw. Unlike these pairs, held-out pairs often differ in several flaws.
    """

    def measure_accuracies(pairs: Mapping[str, list[Record]]) -> dict[str, float]:
        encoded = {name: _tokenise_pairs(context, each) for name, each in pairs.items()}
        return {name: trainer.evaluate(each).accuracy.value() for name, each in encoded.items()}

    results: dict[str, Any] = {}
    if (judge := context.judge) is not None:
        config, eval_records = context.config, context.parts[Phase.reward].eval
        rows = dict.fromkeys(held_out["row"][: config.reward.eval_examples])
        records = [eval_records[row] for row in rows]
        pairs: defaultdict[str, list[Record]] = defaultdict(list)
        for record in records:
            assert record.prompt is not None
            minimal_pairs = judge.minimal_pairs(record.prompt, seed=config.data_seed)
            for flaw, (right, flawed) in minimal_pairs.items():
                pairs[flaw].append(Record(prompt=record.prompt, chosen=right, rejected=flawed))
        results["best_possible_accuracy"] = judge.expected_gold_accuracy(records)
        results["minimal_pairs"] = measure_accuracies(pairs)
        if config.reward.unpaired is not None:
            results["pair_accuracy"] = measure_accuracies({"pairs": records})["pairs"]
    return results | ({"groups": measure_accuracies(groups)} if groups else {})


def _tokenise_pairs(context: RunContext, pairs: Sequence[Record]) -> Dataset:
    """Return pairs as token ids; skip pairs with a sequence that is too long."""
    from datasets import Dataset

    config = context.config
    encoder = Encoder(context.tokenizer, config.data.template)
    limit = Limit("reward.max_tokens", config.reward.max_tokens)
    columns, _ = pair_columns(list(enumerate(pairs)), encoder, limit)
    return Dataset.from_dict(columns)


class PairLoss(NamedTuple):
    """The loss that ``reward.loss`` selects, on pairs."""

    config: RewardConfig

    def has_loss_columns(self, rows: Rows) -> bool:
        """Return True if ``rows`` are pairs with the margins or scores that the loss reads."""
        if self.config.unpaired is not None:
            return False
        if self.config.loss is RewardLossName.regression:
            return CHOSEN_SCORE in rows
        return self.config.margin_column is None or MARGIN in rows

    def __call__(
        self, chosen_BS: Tensor, rejected_BS: Tensor, batch: PreferenceBatch, rows: Rows
    ) -> Tensor:
        """Return each pair's loss (B,) from one model's values; some losses read ``rows`` too."""
        chosen_B = end_scores(chosen_BS, batch.chosen.attend_BS)
        rejected_B = end_scores(rejected_BS, batch.rejected.attend_BS)
        if self.config.loss is RewardLossName.regression:
            chosen_wanted_B = chosen_B.new_tensor(rows[CHOSEN_SCORE])
            rejected_wanted_B = chosen_B.new_tensor(rows[REJECTED_SCORE])
            error_B = regression_loss(chosen_B, chosen_wanted_B)
            return (error_B + regression_loss(rejected_B, rejected_wanted_B)) / 2
        margin_B = torch.zeros_like(chosen_B)
        if self.config.margin_column is not None:
            margin_B = chosen_B.new_tensor(rows[MARGIN])
        smoothing = self.config.label_smoothing
        if self.config.loss is RewardLossName.end:
            return end_loss(chosen_B, rejected_B, margin_B, label_smoothing=smoothing)
        return divergence_loss(
            chosen_BS, rejected_BS, batch, margin_B=margin_B, label_smoothing=smoothing
        )


class RewardTrainer(Part):
    """A trainer that updates the reward model, one optimizer step on pairs per call.

    A method's subclass may add further models to ``engines``, and their steps to ``steps``.
    """

    unit = "pairs"  # the examples, as metrics name them

    def __init__(self, context: RunContext, steps: Sequence[PairStep]) -> None:
        """Build the engine that trains the model in the optimizer steps ``steps``."""
        config, self.context, self.steps = context.config, context, steps
        self._collate = partial(collate_pair_rows, context, max_tokens=config.reward.max_tokens)
        self.plan = batch_plans(config)[Phase.reward]
        settings, ranks = context.settings, context.ranks
        self._shared: Any = {"settings": settings, "plan": self.plan, "ranks": ranks}
        self.source = reward_model_source(config)
        self._loss = PairLoss(config.reward)
        seed = seed_for(config.seed, "reward_model")
        scorer = build_scorer(
            self.source,
            context.tokenizer,
            seed=seed,
            extensions=find_model_extensions(config, Role.reward_training, seed=seed),
            shard=build_parameter_placer(Role.reward_training, **self._shared),
        )
        require_enough_positions(
            scorer.pretrained,
            config.reward.max_tokens,
            key="reward_model",
            wanted="reward.max_tokens",
        )
        self.engines = {"model": self.build_engine(scorer, len(steps))}

    @classmethod
    def build(cls, context: RunContext, steps: list[PairStep], _pairs: Dataset) -> Self:
        """Return the trainer; a method's trainer may add steps on ``_pairs`` to ``steps``."""
        return cls(context, steps)

    @property
    def scorer(self) -> Scorer:
        """Return the reward model that the engine named "model" trains."""
        scorer = self.engines["model"].module
        assert isinstance(scorer, Scorer)
        return scorer

    def prepare_learners(self, step: int) -> list[AnyEngine]:
        """Prepare ``step``, counted from 1; return the engines to train in this step."""
        return [self.engines["model"]]

    def pair_weights_per_learner(self, pairs: Sequence[int], weights: Sequence[float]) -> Tensor:
        """Return the weights (M, B) of pairs, given their indices, in the losses of M learners."""
        return torch.tensor([weights])

    def token_values(self, ids_BS: Tensor, *, trains: bool = False) -> Iterator[Tensor]:
        """Yield the values (B, S) of each model to train (if ``trains``) or to evaluate."""
        yield self.engines["model"](ids_BS)

    def swap_in_final_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that are evaluated and saved."""
        return nullcontext()

    def results(self, after: RewardEvaluation) -> dict[str, Any]:
        """Return the entries of result.json for the evaluation ``after`` training."""
        return after.results()

    def build_extra_writer(self, after: RewardEvaluation) -> Callable[[Path], None] | None:
        """Return a function that writes further files into the model's folder, or None."""
        return None

    def train_step(
        self,
        step: int,
        pairs: Sequence[int],
        rows: Rows,
        weights: Sequence[float],
        *,
        num_prompts: int,
    ) -> dict[str, float]:
        """Take optimizer step ``step`` (from 1) on this rank's share of a batch; return metrics.

        ``pairs`` are the indices of ``rows`` among all pairs. The loss of a model is the
        weighted sum over the pairs of all ranks, divided by ``num_prompts``.
        """
        started = time.monotonic()
        learners = self.prepare_learners(step)
        weights_MB = self.pair_weights_per_learner(pairs, weights)

        def compute_losses(rows: Rows) -> Iterator[tuple[Tensor, Metrics]]:
            return ((loss / num_prompts, metrics) for loss, metrics in self.losses(rows))

        parts = split_table_rows({**rows, "weights": weights_MB.T.tolist()}, self.plan.micro)
        metrics, values = take_optimizer_steps(
            self.context, Phase.reward, learners, parts, compute_losses
        )
        loss = metrics["reward/loss"]
        assert isinstance(loss, Mean)
        count = int(loss.count) / len(learners)
        return values | {f"reward/{self.unit}_per_second": count / (time.monotonic() - started)}

    def losses(self, rows: Rows) -> Iterator[tuple[Tensor, Metrics]]:
        """Yield the loss of each learner, a sum over ``rows`` with their weights, and metrics."""
        batch = self._collate(rows)
        weights_BM = torch.tensor(rows["weights"], device=self.context.ranks.device)
        values = self.token_values(batch.concatenate().ids_BS, trains=True)
        for values_BS, weights_B in zip(values, weights_BM.unbind(1), strict=True):
            chosen_BS, rejected_BS = values_BS.chunk(2)
            result = build_reward_loss(  # pairs that are repeated as padding have weight 0
                self._loss(chosen_BS, rejected_BS, batch, rows),
                end_scores(chosen_BS, batch.chosen.attend_BS),
                end_scores(rejected_BS, batch.rejected.attend_BS),
                weights_B,
            )
            yield result.loss, loss_metrics(Phase.reward, result)

    def evaluate(self, examples: Any) -> RewardEvaluation:
        """Return means over held-out pairs; the loss only if the pairs have the columns for it."""
        config = self.context.config.reward

        def measure_rows(rows: Rows, keep_B: Tensor) -> Metrics:
            batch = self._collate(rows)
            ids_BS = batch.concatenate().ids_BS
            values = [each_BS.chunk(2) for each_BS in self.token_values(ids_BS)]
            chosen_BM, rejected_BM = (
                torch.stack([end_scores(each[side], part.attend_BS) for each in values], dim=1)
                for side, part in enumerate(batch)
            )
            metrics = self.measure_scores(chosen_BM, rejected_BM, keep_B)
            if self._loss.has_loss_columns(rows):
                losses = [self._loss(each[0], each[1], batch, rows) for each in values]
                metrics["loss"] = Mean.of(torch.stack(losses).mean(dim=0), keep_B)
            return metrics

        sizes = {"limit": config.eval_examples, "micro": self.plan.micro}
        metrics = measure_held_out(self.context, self, examples, measure_rows, **sizes)
        return RewardEvaluation({n: m for n, m in metrics.items() if isinstance(m, Mean)})

    def measure_scores(self, chosen_BM: Tensor, rejected_BM: Tensor, keep_B: Tensor) -> Metrics:
        """Return measures of the scores of held-out pairs; ``keep_B`` is False for padding rows."""
        is_pairwise = self.context.config.reward.loss is not RewardLossName.regression
        return measure_scores(chosen_BM, rejected_BM, keep_B, is_pairwise=is_pairwise)

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the model with its final weights, with dropout and gradients disabled."""
        with ExitStack() as stack:
            for engine in self.engines.values():
                stack.enter_context(engine.evaluating())
                stack.enter_context(computing_as_saved(self.context.config, engine))
            stack.enter_context(self.swap_in_final_weights())
            yield self.scorer

    def close(self) -> None:
        """Free the memory of the engines."""
        for engine in self.engines.values():
            engine.close()

    def build_engine(self, module: nn.Module, steps: int) -> AnyEngine:
        """Build an engine that trains ``module``, with a schedule over ``steps`` steps."""
        config, role = self.context.config, Role.reward_training
        optimizer = optimizer_settings(config, config.reward, Phase.reward, role, total_steps=steps)
        return build_engine(module, role=role, optimizer=optimizer, **self._shared)


class ResponseTrainer(RewardTrainer):
    """A trainer that updates the reward model, one optimizer step on graded responses per call."""

    unit = "responses"

    def losses(self, rows: Rows) -> Iterator[tuple[Tensor, Metrics]]:
        """Yield the loss, a sum over the responses ``rows``, and metrics."""
        scores_B = self._score(rows)
        losses_B, means = self._measure(scores_B, scores_B.new_tensor(rows["grade"]))
        yield losses_B.sum(), {f"reward/{name}": mean for name, mean in means.items()}

    def evaluate(self, examples: Any) -> RewardEvaluation:
        """Return measures of held-out responses, or of pairs, such as the pairs of groups."""
        if "grade" not in examples.column_names:
            return super().evaluate(examples)
        limit, micro = self.context.config.reward.eval_examples, self.plan.micro
        sizes = {"limit": limit, "micro": micro}
        scores_N = held_out_values(self.context, self, examples, self._score, **sizes)
        grades_N = scores_N.new_tensor(examples["grade"][:limit])
        return RewardEvaluation(
            self._measure(scores_N, grades_N)[1], measure_ranking(scores_N, grades_N)
        )

    def _score(self, rows: Rows) -> Tensor:
        """Return the end scores (B,) of the responses ``rows``."""
        batch = collate_sequences(
            rows["ids"],
            rows["prompt_tokens"],
            pad_id=self.context.tokenizer.pad_token_id,
            device=self.context.ranks.device,
            max_width=self.context.config.reward.max_tokens,
        )
        (values_BS,) = self.token_values(batch.ids_BS, trains=True)
        return end_scores(values_BS, batch.attend_BS)

    def _measure(self, scores_B: Tensor, grades_B: Tensor) -> tuple[Tensor, dict[str, Mean]]:
        """Return the loss (B,) of each score, and means over the responses."""
        if self.context.config.reward.unpaired is Unpaired.scores:
            losses_B = regression_loss(scores_B, grades_B)
            return losses_B, {"loss": Mean.of(losses_B)}
        losses_B, is_good_B = classification_loss(scores_B, grades_B), grades_B > 0
        return losses_B, {
            "loss": Mean.of(losses_B),
            "chosen_score": Mean.of(scores_B, is_good_B),
            "rejected_score": Mean.of(scores_B, ~is_good_B),
        }


def build_trainer(context: RunContext, pairs: Dataset) -> RewardTrainer:
    """Build the trainer for tokenised ``pairs``: a method's trainer, if any, or the core's."""
    steps = plan_pair_steps(context, pairs, context.config.reward.epochs, "shuffle")
    core_trainer = RewardTrainer if context.config.reward.unpaired is None else ResponseTrainer
    methods = methods_in_use(context.config)
    from_methods = classes_of(RewardTrainer, (method.reward_trainer() for method in methods))
    return (from_methods or [core_trainer])[0].build(context, steps, pairs)


def plan_pair_steps(
    context: RunContext, pairs: Dataset, epochs: float, *stream: str
) -> list[PairStep]:
    """Return the optimizer steps of ``epochs`` passes; ``stream`` names the random numbers."""
    config = context.config.reward
    return divide_pairs_into_steps(
        pairs["group"][:] if config.group_pairs and not config.unpaired else range(len(pairs)),
        batch_size=config.batch_size,
        epochs=epochs,
        seed=seed_for(context.config.seed, "reward", *stream),
    )
