"""DPO: the SFT model learns from preferences directly, without a reward model or rollouts.

Shapes: B = pairs, or sequences of a batch; S = tokens of whole sequences.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from torch import Tensor

from rlhf.algorithms.dpo import DpoLoss, DpoLossLiteral, dpo_loss, sequence_logprobs
from rlhf.base.intervals import wilson_interval
from rlhf.base.metrics import Mean, Metrics, loss_metrics
from rlhf.base.random_streams import Shuffle, seed_for
from rlhf.base.types import SequenceBatch, TokenModel, TokenPositions
from rlhf.config.batches import batch_plans, num_phase_steps
from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.data.splits import phase_of_dpo_prompts
from rlhf.engine.devices import peak_memory_gib
from rlhf.engine.select import AnyEngine, build_engine
from rlhf.engine.settings import optimizer_settings
from rlhf.engine.zero3_partition import build_parameter_placer
from rlhf.models.build import require_enough_positions
from rlhf.models.language_model import kept_token_logprobs
from rlhf.phases.ppo.models import SeparateModels
from rlhf.phases.shared.backends import build_rollout_backend
from rlhf.phases.shared.checkpoints import Checkpoints
from rlhf.phases.shared.context import RunContext, phase_tokens
from rlhf.phases.shared.exporting import computing_as_saved, save_trained_model
from rlhf.phases.shared.policies import build_policy, build_reference, policy_source
from rlhf.phases.shared.policy_evaluation import AnsweringPolicy, HeldOutPrompts, evaluate_policy
from rlhf.phases.shared.scoring import zero_scores
from rlhf.phases.shared.supervised import (
    Rows,
    collate_pair_rows,
    measure_held_out,
    run_supervised,
    share_of_this_rank,
    split_table_rows,
    take_optimizer_steps,
)


def run_dpo(context: RunContext) -> dict[str, Any]:
    """Train, evaluate and save the policy; return the phase's entries of result.json."""
    config = context.config.dpo
    data = phase_tokens(context, Phase.dpo)
    held_out = HeldOutPrompts.from_phase(context, phase_of_dpo_prompts(context.parts))
    total_steps = num_phase_steps(context.config, Phase.dpo, examples=len(data.train))
    trainer = DpoTrainer(context, total_steps=total_steps)
    context.opened.callback(trainer.close)
    checkpoints = Checkpoints(context, Phase.dpo, {"policy": trainer.policy})
    if not checkpoints.is_resumed:
        checkpoints.results = _evaluate_answers(context, trainer, held_out, "before")

    shuffle = Shuffle(len(data.train), seed=seed_for(context.config.seed, "dpo", "shuffle"))

    def train_step(step: int) -> dict[str, float]:
        return trainer.train_step(data.train[shuffle.batch_indices(step - 1, config.batch_size)])

    run_supervised(
        context,
        checkpoints,
        config,
        total_steps=total_steps,
        train_step=train_step,
        evaluate=lambda: trainer.measure(data.eval)[0],
    )
    metrics, measured = trainer.measure(data.eval)
    checkpoints.log_held_out(metrics)
    result = checkpoints.results | _evaluate_answers(context, trainer, held_out, "after")
    save_trained_model(
        context,
        trainer.policy,
        context.run_dir / "dpo" / "actor",
        source=policy_source(context.config),
        what="A language model after DPO.",
    )
    result |= {**measured, "kl_to_reference": result["kl_after"], **checkpoints.totals()}
    return result | {"peak_memory_gib": peak_memory_gib(context.ranks)}


def _evaluate_answers(
    context: RunContext, trainer: DpoTrainer, held_out: HeldOutPrompts, when: str
) -> dict[str, Any]:
    """Evaluate the policy's answers; return entries of result.json, whose names end in ``when``."""
    num_prompts = context.config.dpo.eval_prompts
    answers = evaluate_policy(context, trainer.answering_policy, held_out, num_prompts=num_prompts)
    result = answers.results(context.config, when)
    del result[f"score_{when}"]  # always 0: DPO has no reward model
    return result


class DpoTrainer:
    """A trainer that updates the policy by DPO, one optimizer step on pairs per call."""

    def __init__(self, context: RunContext, *, total_steps: int) -> None:
        config, tokenizer = context.config, context.tokenizer
        self._context = context
        self._plan = batch_plans(config)[Phase.dpo]
        shared: Any = {"settings": context.settings, "plan": self._plan, "ranks": context.ranks}
        shard = build_parameter_placer(Role.actor, **shared)
        module = build_policy(config, tokenizer, dropout=0.0, shard=shard)
        require_enough_positions(
            module.pretrained, config.dpo.max_tokens, key="model", wanted="dpo.max_tokens"
        )
        settings = optimizer_settings(
            config, config.dpo, Phase.dpo, Role.actor, total_steps=total_steps
        )
        self.policy = build_engine(module, role=Role.actor, optimizer=settings, **shared)
        self._reference = build_reference(
            config,
            Phase.dpo,
            self.policy,
            tokenizer,
            partial(build_engine, role=Role.reference, **shared),
            shard=build_parameter_placer(Role.reference, **shared),
        )
        rollout = config.rollout
        models = SeparateModels(
            self.policy, self._reference, None, zero_scores, temperature=rollout.temperature
        )
        backend = partial(
            build_rollout_backend,
            config,
            tokenizer,
            temperature=rollout.eval_temperature or rollout.temperature,
            dtype=context.settings.dtype,
            ranks=context.ranks,
            rows=self._plan.micro,
        )
        # The policy to evaluate, backends that sample its answers, and models that score them.
        self.answering_policy = AnsweringPolicy(
            self.policy, backend(), backend(greedy=True), models, self._plan.micro
        )

    def train_step(self, rows: Rows) -> dict[str, float]:
        """Take an optimizer step on this rank's share of the batch ``rows``; return metrics."""
        started, context = time.monotonic(), self._context
        count, micro = len(rows["length"]), self._plan.micro
        own_rows = share_of_this_rank(context, range(count), rows["length"], micro=micro)
        rows = {name: [values[row] for row in own_rows] for name, values in rows.items()}

        def compute_losses(rows: Rows) -> Iterator[tuple[Tensor, Metrics]]:
            result = self._compute_loss(rows)
            yield result.loss / count, loss_metrics(Phase.dpo, result)

        parts = split_table_rows(rows, micro)
        _, values = take_optimizer_steps(context, Phase.dpo, [self.policy], parts, compute_losses)
        return values | {"dpo/pairs_per_second": count / (time.monotonic() - started)}

    def measure(self, examples: Any) -> tuple[dict[str, float], dict[str, Any]]:
        """Return metrics to log, and entries of result.json, of the held-out ``examples``."""
        accuracy, loss = self.evaluate(examples)
        metrics = {"dpo/eval_accuracy": accuracy.value(), "dpo/eval_loss": loss.value()}
        interval = wilson_interval(float(accuracy.total), float(accuracy.count))
        return metrics, {"accuracy": accuracy.value(), "accuracy_ci": list(interval)}

    def evaluate(self, examples: Any) -> tuple[Mean, Mean]:
        """Return accuracy (of the implicit rewards) and loss on the held-out pairs ``examples``."""

        def measure_rows(rows: Rows, keep_B: Tensor) -> Metrics:
            result = self._compute_loss(rows, keep_B)
            return {"accuracy": result.accuracy, "loss": result.mean_loss}

        context, micro = self._context, self._plan.micro
        sizes = {"limit": context.config.dpo.eval_examples, "micro": micro}
        with computing_as_saved(context.config, self.policy):
            measured = measure_held_out(context, self.policy, examples, measure_rows, **sizes)
        accuracy, loss = measured["accuracy"], measured["loss"]
        assert isinstance(accuracy, Mean)
        assert isinstance(loss, Mean)
        return accuracy, loss

    def close(self) -> None:
        """Close the engines and free their memory."""
        for model in (self.policy, self._reference):
            if isinstance(model, AnyEngine):
                model.close()

    def _compute_loss(self, rows: Rows, keep_B: Tensor | None = None) -> DpoLoss:
        config = self._context.config.dpo
        batch = collate_pair_rows(self._context, rows, max_tokens=config.max_tokens)
        sequences = batch.concatenate()
        with self._reference.evaluating():
            reference = logprobs_of_responses(self._reference, sequences).chunk(2)
        logprobs = [*logprobs_of_responses(self.policy, sequences).chunk(2), *reference]
        if keep_B is not None:
            logprobs = [logprobs_B[keep_B] for logprobs_B in logprobs]
        return dpo_loss(
            *logprobs,
            beta=config.beta,
            label_smoothing=config.label_smoothing,
            loss=cast(DpoLossLiteral, config.loss.value),
        )


def logprobs_of_responses(model: TokenModel, sequences: SequenceBatch) -> Tensor:
    """Return the log-probabilities (B,) of whole responses, from one forward pass."""
    logprobs_N = kept_token_logprobs(model, sequences)
    rows_N = TokenPositions.from_batch(sequences).rows_N
    return sequence_logprobs(logprobs_N, rows_N, num_rows=len(sequences.ids_BS))
