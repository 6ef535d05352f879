"""The training loop of the phases that learn from examples: SFT, reward model and DPO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf.base.heartbeat import beat
from rlhf.base.intervals import mean_of
from rlhf.base.metrics import Metrics, merge_metrics
from rlhf.base.random_streams import seed_dropout
from rlhf.base.types import Engine, Model, PreferenceBatch
from rlhf.config.schema.supervised import DpoConfig, SftConfig
from rlhf.data.collate import EvalRows, assign_rows_to_ranks, collate_pairs, eval_batches
from rlhf.options import RewardConfig
from rlhf.phases.shared.checkpoints import Checkpoints
from rlhf.phases.shared.context import RunContext
from rlhf.run.console import Console

T = TypeVar("T")
B = TypeVar("B")  # a micro-batch
SupervisedConfig = SftConfig | RewardConfig | DpoConfig
Rows = dict[str, list[Any]]  # the values of each column, one per example


def run_supervised(
    context: RunContext,
    checkpoints: Checkpoints,
    config: SupervisedConfig,
    *,
    total_steps: int,
    train_step: Callable[[int], dict[str, float]],
    evaluate: Callable[[], dict[str, float]],
) -> None:
    """Take the remaining steps of a phase, and evaluate the model every ``eval_every`` steps.

    ``train_step`` gets the number of a step, from 1; it and ``evaluate`` return metrics to log.
    """
    phase = checkpoints.phase
    warn_if_lr_never_peaks(context.console, phase, config, steps=total_steps)
    with context.console.progress(phase, total_steps) as progress:
        for step in checkpoints.steps(total_steps):
            seed_dropout(context.config.seed, phase, step, rank=context.ranks.rank)
            values = train_step(step)
            checkpoints.log_step(values)
            progress.advance(step, values)
            if checkpoints.is_evaluation_due(config.eval_every):
                checkpoints.log_evaluation(evaluate())


def warn_if_lr_never_peaks(
    console: Console, phase: str, config: SupervisedConfig, *, steps: int
) -> None:
    """Print a warning if ``phase`` ends before its learning rate has reached its peak."""
    if steps <= config.warmup_steps:
        console.say(
            f"warning: {phase} takes {steps} step{'s' * (steps != 1)} with {phase}.warmup_steps="
            f"{config.warmup_steps}: the learning rate never reaches {phase}.lr={config.lr:g}. "
            f"Give the phase more examples (data.split), raise {phase}.epochs, or lower "
            f"{phase}.warmup_steps or {phase}.batch_size"
        )


def share_of_this_rank(
    context: RunContext, items: Sequence[T], lengths: Sequence[int], *, micro: int
) -> list[T]:
    """Return this rank's equal share of a global batch, ordered for micro-batches of ``micro``.

    With data.bucket_by_length the items of a micro-batch have similar ``lengths`` (one per
    item); the optimizer step is the same up to rounding.
    """
    ranks = context.ranks
    if not context.config.data.bucket_by_length:
        return ranks.own_rows(items)
    indices = assign_rows_to_ranks(lengths, ranks=ranks.size, micro=micro)[ranks.rank]
    return [items[index] for index in indices]


def split_table_rows(rows: Rows, size: int) -> Iterator[Rows]:
    """Yield ``rows`` in parts of ``size`` rows; the last part may be shorter."""
    for start in range(0, len(next(iter(rows.values()))), size):
        yield {name: values[start : start + size] for name, values in rows.items()}


def collate_pair_rows(context: RunContext, rows: Rows, *, max_tokens: int) -> PreferenceBatch:
    """Return rows of the tokenised pairs as a batch on this rank's device."""
    return collate_pairs(
        rows["chosen_ids"],
        rows["rejected_ids"],
        rows["prompt_tokens"],
        pad_id=context.tokenizer.pad_token_id,
        device=context.ranks.device,
        max_width=max_tokens,
    )


def take_optimizer_steps(
    context: RunContext,
    phase: str,
    engines: Sequence[Engine],
    batches: Iterable[B],
    compute_losses: Callable[[B], Iterable[tuple[Tensor, Metrics]]],
) -> tuple[Metrics, dict[str, float]]:
    """Take one optimizer step per engine; return metrics over all ranks, and values to log.

    For a micro-batch, ``compute_losses`` yields the loss and the metrics of each engine in turn;
    the graph of a loss is freed before the next loss is computed. The values also have the first
    engine's learning rate, the mean gradient norm and the share of skipped steps.
    """
    metrics: Metrics = {}
    for batch in batches:
        for engine, (loss, part) in zip(engines, compute_losses(batch), strict=True):
            engine.backward(loss)
            metrics = merge_metrics(metrics, part)
    reports = [engine.step() for engine in engines]
    metrics = context.ranks.reduce_metrics(metrics)
    return metrics, {
        **{name: metric.value() for name, metric in metrics.items()},
        f"{phase}/learning_rate": reports[0].learning_rate,
        f"{phase}/grad_norm": mean_of([report.grad_norm for report in reports]),
        f"{phase}/skipped_steps": mean_of([float(report.is_skipped) for report in reports]),
    }


def measure_held_out(
    context: RunContext,
    model: Model,
    examples: Any,
    measure_rows: Callable[[Rows, Tensor], Metrics],
    *,
    limit: int,
    micro: int,
) -> Metrics:
    """Return metrics of the first ``limit`` held-out examples, over all ranks.

    ``measure_rows`` returns the metrics of ``micro`` rows, given a mask (B,) that is False for
    padding rows.
    """
    metrics: Metrics = {}
    for rows, keep_B in _held_out_batches(context, model, examples, limit=limit, micro=micro):
        metrics = merge_metrics(metrics, measure_rows(examples[rows], keep_B))
    return context.ranks.reduce_metrics(metrics)


def held_out_values(
    context: RunContext,
    model: Model,
    examples: Any,
    measure_rows: Callable[[Rows], Tensor],
    *,
    limit: int,
    micro: int,
) -> Tensor:
    """Return a value of each of the first ``limit`` held-out examples, on every rank.

    ``measure_rows`` returns the values (B,) of up to ``micro`` rows. The result (N,) is in fp64.
    """
    values_N = torch.zeros(
        min(len(examples), limit), dtype=torch.float64, device=context.ranks.device
    )
    for rows, keep_B in _held_out_batches(context, model, examples, limit=limit, micro=micro):
        places_B = torch.tensor(rows, device=values_N.device)
        values_N[places_B[keep_B]] = measure_rows(examples[rows])[keep_B].double()
    return context.ranks.sum(values_N).cpu()


def _held_out_batches(
    context: RunContext, model: Model, examples: Any, *, limit: int, micro: int
) -> Iterator[EvalRows]:
    """Yield this rank's rows of the first ``limit`` examples while ``model`` is evaluating."""
    total = min(len(examples), limit)
    with model.evaluating():
        lengths = examples[:total]["length"]
        for rows in eval_batches(total, batch_size=micro, ranks=context.ranks, lengths=lengths):
            beat()
            yield rows
