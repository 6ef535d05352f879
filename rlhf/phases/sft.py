"""Step 1 of InstructGPT, supervised fine-tuning: the model learns to answer like demonstrations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from rlhf.algorithms.sft import sft_loss
from rlhf.base.metrics import Metrics, loss_metrics, perplexity
from rlhf.base.random_streams import Shuffle, seed_for
from rlhf.base.types import SequenceBatch, TokenModel
from rlhf.config.batches import batch_plans, num_phase_steps
from rlhf.config.choices import LossOn, Phase
from rlhf.config.roles import Role
from rlhf.data.collate import collate_sequences
from rlhf.engine.select import build_engine
from rlhf.engine.settings import optimizer_settings
from rlhf.engine.zero3_partition import build_parameter_placer
from rlhf.models.build import build_actor, find_model_extensions, require_enough_positions
from rlhf.models.language_model import LanguageModel, kept_token_logprobs
from rlhf.models.sources import ModelSource
from rlhf.phases.shared.checkpoints import Checkpoints
from rlhf.phases.shared.context import RunContext, phase_tokens
from rlhf.phases.shared.exporting import computing_as_saved, save_trained_model
from rlhf.phases.shared.supervised import (
    Rows,
    measure_held_out,
    run_supervised,
    share_of_this_rank,
    split_table_rows,
    take_optimizer_steps,
)


def run_sft(context: RunContext) -> dict[str, Any]:
    """Train, evaluate and save the SFT model; return the phase's entries of result.json."""
    config = context.config.sft
    data = phase_tokens(context, Phase.sft)
    total_steps = num_phase_steps(context.config, Phase.sft, examples=len(data.train))
    trainer = SftTrainer(context, total_steps=total_steps)
    context.opened.callback(trainer.engine.close)
    checkpoints = Checkpoints(context, Phase.sft, {"model": trainer.engine})
    if not checkpoints.is_resumed:
        checkpoints.results["before"] = trainer.evaluate(data.eval)
        checkpoints.log_held_out(checkpoints.results["before"])

    shuffle = Shuffle(len(data.train), seed=seed_for(context.config.seed, "sft", "shuffle"))

    def train_step(step: int) -> dict[str, float]:
        batch = data.train[shuffle.batch_indices(step - 1, config.batch_size)]
        rows, lengths = range(config.batch_size), batch["length"]
        own_rows = share_of_this_rank(context, rows, lengths, micro=trainer.plan.micro)
        return trainer.train_step({name: [v[i] for i in own_rows] for name, v in batch.items()})

    run_supervised(
        context,
        checkpoints,
        config,
        total_steps=total_steps,
        train_step=train_step,
        evaluate=lambda: trainer.evaluate(data.eval),
    )
    after = trainer.evaluate(data.eval)
    checkpoints.log_held_out(after)
    save_trained_model(
        context,
        trainer.engine,
        context.run_dir / "sft" / "model",
        source=trainer.source,
        what="A language model after supervised fine-tuning.",
    )
    return {
        "perplexity_before": checkpoints.results["before"]["sft/eval_perplexity"],
        "perplexity_after": after["sft/eval_perplexity"],
    } | checkpoints.totals()


class SftTrainer:
    """A trainer that updates the SFT model, one optimizer step on whole sequences per call."""

    def __init__(self, context: RunContext, *, total_steps: int) -> None:
        config = context.config
        self._context = context
        self.plan = batch_plans(config)[Phase.sft]
        self.source = ModelSource.from_config(
            config.model, key="model", dropout=config.model.dropout
        )
        shared: Any = {"settings": context.settings, "plan": self.plan, "ranks": context.ranks}
        seed = seed_for(config.seed, "model")
        model = build_actor(
            self.source,
            context.tokenizer,
            seed=seed,
            extensions=find_model_extensions(config, Role.sft, seed=seed),
            shard=build_parameter_placer(Role.sft, **shared),
        )
        require_enough_positions(model, config.sft.max_tokens, key="model", wanted="sft.max_tokens")
        self.engine = build_engine(
            LanguageModel(model, fp32_logits=config.hardware.keeps_fp32_logits),
            role=Role.sft,
            optimizer=optimizer_settings(
                config, config.sft, Phase.sft, Role.sft, total_steps=total_steps
            ),
            **shared,
        )

    def train_step(self, rows: Rows) -> dict[str, float]:
        """Take an optimizer step on ``rows``, this rank's share of a batch; return metrics."""
        started, context = time.monotonic(), self._context
        batches = [_collate(context, part) for part in split_table_rows(rows, self.plan.micro)]
        counts = [(b.keep_BS[:, 1:].sum(), b.attend_BS.sum()) for b in batches]
        num_kept, num_tokens = context.ranks.sum(
            torch.stack([torch.stack(pair) for pair in counts]).sum(dim=0)
        )

        def compute_losses(batch: SequenceBatch) -> Iterator[tuple[torch.Tensor, Metrics]]:
            result = sft_loss(kept_token_logprobs(self.engine, batch))
            yield result.loss / num_kept, loss_metrics(Phase.sft, result)

        _, values = take_optimizer_steps(context, Phase.sft, [self.engine], batches, compute_losses)
        return values | {"sft/tokens_per_second": int(num_tokens) / (time.monotonic() - started)}

    def evaluate(self, examples: Any) -> dict[str, float]:
        """Return the mean loss (nats per token) and perplexity of the held-out ``examples``."""
        with computing_as_saved(self._context.config, self.engine):
            loss = held_out_loss(self._context, self.engine, examples, micro=self.plan.micro)
        return {"sft/eval_loss": loss, "sft/eval_perplexity": perplexity(loss)}


def held_out_loss(context: RunContext, model: TokenModel, examples: Any, *, micro: int) -> float:
    """Return the mean loss of held-out examples, in nats per token that sft.loss_on selects."""

    def measure_rows(rows: Rows, keep_B: torch.Tensor) -> Metrics:
        batch = _collate(context, rows)
        batch = batch._replace(keep_BS=batch.keep_BS & keep_B[:, None])
        return {"loss": sft_loss(kept_token_logprobs(model, batch)).mean_loss}

    limit = context.config.sft.eval_examples
    metrics = measure_held_out(context, model, examples, measure_rows, limit=limit, micro=micro)
    return metrics["loss"].value()


def _collate(context: RunContext, rows: Rows) -> SequenceBatch:
    learns_all = context.config.sft.loss_on is LossOn.all
    return collate_sequences(
        rows["ids"],
        [0 if learns_all else n for n in rows["prompt_tokens"]],
        pad_id=context.tokenizer.pad_token_id,
        device=context.ranks.device,
        max_width=context.config.sft.max_tokens,
        observed=() if learns_all else rows.get("observed", ()),
    )
