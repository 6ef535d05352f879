"""The context that every phase gets, and the helpers that all phases share."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from rlhf.algorithms.schedule import lr_schedule
from rlhf.checkpoint.model_card import made_by
from rlhf.checkpoint.model_folder import save_model
from rlhf.checkpoint.phase_state import Checkpoint
from rlhf.config.batches import num_readers
from rlhf.config.choices import Phase
from rlhf.config.schema.optimizer import OptimizerConfig
from rlhf.config.schema.run import RunConfig
from rlhf.data.batching import deal
from rlhf.data.splits import Part
from rlhf.data.tokens import TokenData, TokenLimits, cache_key, columns_for, tokenise
from rlhf.engine.settings import EngineSettings, OptimizerSettings
from rlhf.host_copies import sent
from rlhf.metrics import Metrics, merge_metrics
from rlhf.model_call import model_call
from rlhf.phases.shared.exporting import Export, sample_as_trained
from rlhf.phases.shared.pulse import Pulse
from rlhf.phases.shared.stop_requests import StopRequests
from rlhf.random_streams import seed_dropout, seed_for
from rlhf.tracking.console import Console
from rlhf.tracking.tracker import Tracker
from rlhf.types import Batch, Engine, Judge, Ranks, StepReport
from rlhf.user_paths import user_path

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One rank's view of the run: its configuration, ranks, data and outputs."""

    config: RunConfig
    run_dir: Path
    ranks: Ranks
    settings: EngineSettings
    tokenizer: PreTrainedTokenizerBase
    parts: Mapping[Phase, Part]
    judge: Judge | None
    console: Console
    tracker: Tracker
    resumes: Mapping[Phase, Checkpoint] = field(default_factory=dict)  # phases that were stopped
    requests: StopRequests = field(default_factory=StopRequests)
    pulse: Pulse = field(default_factory=Pulse)
    phase_started: float = field(default_factory=time.monotonic)  # seconds of time.monotonic()

    def seed(self, *names: str | int) -> int:
        """Return the seed of the random stream ``names`` of this run."""
        return seed_for(self.config.seed, *names)

    def seed_dropout(self, phase: Phase, step: int) -> None:
        """Make dropout in this step independent of the steps before."""
        seed_dropout(self.config.seed, phase, step, rank=self.ranks.rank)

    def part(self, phase: Phase) -> Part:
        """Return the records that a phase learns from; DPO uses the reward phase's pairs."""
        return self.parts[Phase.reward if phase is Phase.dpo else phase]

    def tokens(self, phase: Phase) -> TokenData:
        """Return the phase's token ids."""
        return self._tokenised(self.part(phase), phase)

    @property
    def asked(self) -> Phase:
        """The phase whose held-out prompts DPO answers: PPO, or reward if PPO has no records."""
        return Phase.ppo if self.parts[Phase.ppo].eval else Phase.reward

    def prompts(self, phase: Phase) -> TokenData:
        """Return the prompts of a phase's records, as token ids."""
        return self._tokenised(self.part(phase), Phase.ppo)

    def held_out(self, phase: Phase) -> Dataset:
        """Return the held-out examples of a phase, as token ids."""
        return self._tokenised(self.part(phase), phase).eval

    def _tokenised(self, part: Part, phase: Phase) -> TokenData:
        config = self.config
        return tokenise(
            part,
            phase,
            self.tokenizer,
            limits=TokenLimits.of(config),
            cache_dir=user_path(config.data.cache_dir, key="data.cache_dir"),
            template=config.data.template,
        )

    def data_key(self, phase: Phase) -> str:
        """Return a hash of the phase's records and the tokenizer."""
        limit = columns_for(phase, TokenLimits.of(self.config))[1].tokens
        template = self.config.data.template
        return cache_key(self.part(phase), phase, self.tokenizer, limit=limit, template=template)

    def warn_of_few_steps(self, phase: str, config: OptimizerConfig, *, steps: int) -> None:
        """Print a warning if ``phase`` ends before its learning rate has reached its peak."""
        if steps <= config.warmup_steps:
            self.console.say(
                f"warning: {phase} takes {steps} steps with {phase}.warmup_steps="
                f"{config.warmup_steps}: the learning rate never reaches {phase}.lr={config.lr:g}. "
                f"Give the phase more examples (data.split), raise {phase}.epochs, or lower "
                f"{phase}.warmup_steps or {phase}.batch_size"
            )

    @property
    def readers(self) -> Ranks:
        """Return this rank's place among the ranks that read different rows.

        Ranks that share their sequences (zero.sequence_parallel_size) have the same place.
        """
        size = self.config.zero.sequence_parallel_size
        return replace(self.ranks, rank=self.ranks.rank // size, size=num_readers(self.config))

    def share(self, items: Sequence[T], lengths: Sequence[int], *, micro: int) -> list[T]:
        """Return this rank's equal share of a global batch, ordered for micro-batches of ``micro``.

        With data.bucket_by_length the items of a micro-batch have similar ``lengths`` (one per
        item); the optimizer step is the same up to rounding.
        """
        readers = self.readers
        if not self.config.data.bucket_by_length:
            return rows_of_rank(items, readers)
        places = deal(lengths, ranks=readers.size, micro=micro)[readers.rank]
        return [items[place] for place in places]

    def save(self, export: Export, folder: Path, *, what: str, answers: bool = True) -> None:
        """Write a model as a Hugging Face folder; every rank must call it.

        ``what`` describes the model on its model card, which shows how it ``answers``, if it does.
        """
        if not self.ranks.is_main:
            export.write(None)
        else:
            command = f"Made by `rlhf` {version('rlhf')}, run `{self.config.name}`"
            settings = f"seed {self.config.seed}; its config.yaml holds every setting"
            description = f"{what} {command}, {settings}."
            if answers:
                sample_as_trained(export.model, self.config.rollout)
                records = next(iter(self.parts.values())).eval if self.parts else []
                has_template = self.tokenizer.chat_template is not None
                name, prompts = (
                    f"{folder.parent.name}/{folder.name}",
                    [r.prompt or "" for r in records],
                )
                call = model_call(name, prompts, has_chat_template=has_template)
                description += "\n\n```python\n" + "\n".join(call) + "\n```"
            rows = {str(p): (len(part.train), len(part.eval)) for p, part in self.parts.items()}
            description += made_by(self.run_dir, rows=rows)
            save_model(folder, export.write, self.tokenizer, description=description)
        self.ranks.barrier()


def optimizer_settings(
    config: OptimizerConfig,
    *,
    total_steps: int,
    adapter_lr: float | None = None,
    ema_beta: float = 0.0,
) -> OptimizerSettings:
    """Return settings of AdamW with a schedule over ``total_steps`` optimizer steps."""
    return OptimizerSettings(
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        adapter_lr=adapter_lr,
        ema_beta=ema_beta,
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
    """Take one optimizer step on micro-batches; return their merged metrics and the step's report.

    ``loss_of`` returns a micro-batch's share of the loss, and its metrics.
    """
    metrics: Metrics = {}
    for batch in batches:
        loss, part = loss_of(batch)
        engine.backward(loss)
        metrics = merge_metrics(metrics, part)
    return metrics, engine.step()


def rows_of_rank(global_rows: Sequence[T], ranks: Ranks) -> list[T]:
    """Return this rank's equal share of a global batch, in order."""
    per_rank = len(global_rows) // ranks.size
    return list(global_rows[ranks.rank * per_rank : (ranks.rank + 1) * per_rank])


class EvalRows(NamedTuple):
    """One rank's part of a held-out batch; ``keep_B`` is False for repeated rows that only pad."""

    rows: list[int]
    keep_B: torch.Tensor


def eval_batches(
    total: int, *, batch_size: int, ranks: Ranks, lengths: Sequence[int] | None = None
) -> Iterator[EvalRows]:
    """Yield batches of one size that cover ``total`` examples, the same number on every rank.

    With ``lengths`` (one per example) the longest come first, so that batches need less padding.
    """
    stride = batch_size * ranks.size
    order = list(range(total))
    if lengths is not None:
        order.sort(key=lambda row: -lengths[row])
    for start in range(0, total, stride):
        mine = range(start + ranks.rank * batch_size, start + (ranks.rank + 1) * batch_size)
        keep_B = sent(torch.tensor([row < total for row in mine]), ranks.device)
        yield EvalRows([order[min(row, total - 1)] for row in mine], keep_B)


def forget_peak_memory(ranks: Ranks) -> None:
    """Count a GPU's peak memory from now on; that of a process on a CPU is never forgotten."""
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(ranks.device)


def peak_memory_gib(ranks: Ranks) -> float:
    """Return the peak memory of any rank in GiB: what torch took of the GPU, or of the process."""
    if ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(ranks.device) / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return float(ranks.max(torch.tensor(peak, dtype=torch.float64, device=ranks.device)))
