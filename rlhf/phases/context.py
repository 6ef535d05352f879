"""What every phase is given, and the few things that all three do alike."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.schedule import lr_schedule
from rlhf.algorithms.streams import seed_for
from rlhf.checkpoint.folders import save_model
from rlhf.config.choices import Phase
from rlhf.config.schema import RunConfig
from rlhf.config.training_schema import OptimizerConfig
from rlhf.data.splits import Part
from rlhf.data.tokens import TokenData, TokenLimits, tokenise
from rlhf.engine.deepspeed_engine import EngineSettings, OptimizerSettings
from rlhf.errors import DataError
from rlhf.models.scorer import Scorer
from rlhf.tracking.console import Console
from rlhf.tracking.trackers import SampleWriter
from rlhf.types import (
    Batch,
    Engine,
    Judge,
    Metrics,
    Ranks,
    StepReport,
    Tracker,
    merge_metrics,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One rank's view of the run."""

    config: RunConfig
    run_dir: Path
    ranks: Ranks
    settings: EngineSettings
    tokenizer: PreTrainedTokenizerBase
    parts: Mapping[Phase, Part]
    judge: Judge | None
    console: Console
    tracker: Tracker
    samples: SampleWriter | None

    def seed(self, *names: str | int) -> int:
        """Seed of a named stream of this run."""
        return seed_for(self.config.seed, *names)

    def tokens(self, phase: Phase, *, batch_size: int, key: str) -> TokenData:
        """The phase's token ids; says what was left out.

        Raises:
            DataError: there is less than one batch to train on, or nothing held out.
        """
        config = self.config
        limits = TokenLimits(
            sft=config.sft.max_tokens,
            reward=config.reward.max_tokens,
            prompt=config.rollout.max_prompt_tokens,
        )
        data = tokenise(
            self.parts[phase],
            phase,
            self.tokenizer,
            limits=limits,
            cache_dir=Path(config.data.cache_dir).expanduser(),
        )
        self._say_what_is_used(phase, data)
        if len(data.train) < batch_size or len(data.eval) == 0:
            raise DataError(
                f"data: the {phase} phase has {len(data.train)} examples to train on and "
                f"{len(data.eval)} held out, where it needs at least {key}={batch_size} and 1. "
                f"Give more data, a smaller {key}, a larger share of data.split, "
                "or longer limits if many were left out"
            )
        return data

    def _say_what_is_used(self, phase: Phase, data: TokenData) -> None:
        text = f"{phase}: {len(data.train)} examples to train on, {len(data.eval)} held out"
        reasons = ", ".join(f"{count} {why}" for why, count in data.left_out.items() if count)
        self.console.say(f"{text}; left out: {reasons}" if reasons else text)

    def close(self) -> None:
        """Close what was opened to tell of the run."""
        self.tracker.finish()
        if self.samples is not None:
            self.samples.close()

    def save(self, engine: Engine, folder: Path, *, what: str) -> None:
        """Write the engine's model as a Hugging Face folder; every rank must call it.

        ``what`` tells on its model card what the model is.
        """
        model: Any = (
            engine.module.pretrained if isinstance(engine.module, Scorer) else engine.module
        )
        state = engine.whole_state(model)
        if self.ranks.is_main:
            command = f"Made by `rlhf` {version('rlhf')}, run `{self.config.name}`"
            settings = f"seed {self.config.seed}; its config.yaml holds every setting"
            save_model(
                folder,
                model,
                state,
                self.tokenizer,
                description=f"{what} {command}, {settings}.",
            )
        self.ranks.barrier()


def optimizer_settings(config: OptimizerConfig, *, total_steps: int) -> OptimizerSettings:
    """AdamW and its schedule over ``total_steps`` optimiser steps."""
    return OptimizerSettings(
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        schedule=lr_schedule(
            config.lr_schedule.value,
            warmup_steps=config.warmup_steps,
            total_steps=total_steps,
            min_ratio=config.min_lr_ratio,
        ),
    )


def optimizer_step(
    engine: Engine, batches: Iterable[Batch], loss_of: Callable[[Batch], tuple[Tensor, Metrics]]
) -> tuple[Metrics, StepReport]:
    """One optimiser step on micro-batches, each with its share of the loss and its metrics."""
    metrics: Metrics = {}
    report = None
    for batch in batches:
        loss, part = loss_of(batch)
        engine.backward(loss)
        report = engine.step()
        metrics = merge_metrics(metrics, part)
    assert report is not None, "the plan's micro-batches make exactly one optimiser step"
    return metrics, report


def rows_of_rank(global_rows: Sequence[int], ranks: Ranks) -> list[int]:
    """This rank's equal share of a global batch, in order."""
    per_rank = len(global_rows) // ranks.size
    return list(global_rows[ranks.rank * per_rank : (ranks.rank + 1) * per_rank])


class EvalRows(NamedTuple):
    """One rank's part of a held-out batch; rows beyond the data repeat and are not kept."""

    rows: list[int]
    keep_B: torch.Tensor


def eval_batches(total: int, *, batch_size: int, ranks: Ranks) -> Iterator[EvalRows]:
    """Cover ``total`` examples with batches of one size, the same number on every rank."""
    stride = batch_size * ranks.size
    for start in range(0, total, stride):
        mine = range(start + ranks.rank * batch_size, start + (ranks.rank + 1) * batch_size)
        keep_B = torch.tensor([row < total for row in mine], device=ranks.device)
        yield EvalRows([min(row, total - 1) for row in mine], keep_B)


def peak_memory_gib(ranks: Ranks) -> float:
    """Most memory that any rank has held so far, in GiB: of the GPU, or of the process on a CPU."""
    if ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(ranks.device) / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return float(ranks.max(torch.tensor(peak, dtype=torch.float64, device=ranks.device)))
