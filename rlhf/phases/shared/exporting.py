"""Save an engine's model as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from rlhf.base.types import Engine
from rlhf.base.versions import installed_version
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.models.sources import ModelSource
from rlhf.models.tokenizers import with_separate_padding
from rlhf.phases.shared.context import RunContext
from rlhf.run.model_card import origin_sections, python_example, scorer_example
from rlhf.run.model_folder import (
    SHARD_BYTES,
    Stream,
    rename_to_saved_names,
    save_from_stream,
    save_model,
    tensors_to_save,
)

FENCED = "\n\n```python\n{}\n```"  # an example on a model card


class Export(NamedTuple):
    """A model to save: its class and config, and its tensors by name, which may be shards."""

    model: Any
    engine: Engine
    tensors: Mapping[str, Tensor]
    save: Callable[..., None] = save_from_stream  # writes config and streamed weights on rank 0
    write_more: Callable[[Path], None] | None = None  # writes further files on rank 0
    change: Callable[[Any, Stream], Stream] = lambda _, stream: stream  # edits model and tensors

    def write(self, folder: Path | None, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Write config and weights into ``folder`` on rank 0; all other ranks must pass None.

        Rank 0 holds one file of at most ``shard_bytes`` in memory at a time, other ranks hold none.
        """
        stream = self.engine.stream_state(self.tensors)
        if folder is None:
            for _ in stream:
                pass
            return
        self.save(folder, self.model, self.change(self.model, stream), shard_bytes=shard_bytes)
        if self.write_more is not None:
            self.write_more(folder)

    def stream(self) -> Stream:
        """Yield, on rank 0, what ``write`` would write; other ranks must call ``write(None)``."""
        stream = self.engine.stream_state(self.tensors)
        return rename_to_saved_names(self.model, self.change(self.model, stream))


def build_export(config: RunConfig, engine: Engine, source: ModelSource | None = None) -> Export:
    """Build the export of the engine's language model or scorer: class, config and tensors.

    For a model with adapters, the export may hold only the adapters, with the model in ``source``
    as their base. Without ``source`` it holds all weights.
    """
    if config.lora.rank > 0:
        from rlhf.options.lora.models import find_export

        if (export := find_export(config, engine, source)) is not None:
            return export
    model: Any = engine.module.pretrained
    return Export(model, engine, tensors_to_save(model))


def computing_as_saved(config: RunConfig, engine: Engine) -> AbstractContextManager[None]:
    """Return a context in which the engine's model computes as its export will compute."""
    if config.lora.rank > 0:
        from rlhf.options.lora.models import computing_merged

        return computing_merged(config, engine.module)
    return nullcontext()


def store_sampling_settings(model: Any, config: RunConfig, *, phase: str) -> None:
    """Store the sampling settings of rollouts in the saved ``model``, as defaults of ``generate``.

    Without do_sample, servers ignore the temperature of a request. The pretrained model's settings
    are dropped: a repetition penalty, for example, would change the policy that was trained. SFT
    reads no length of responses: answers of its model have at most the tokens of an example.
    """
    from transformers import GenerationConfig

    rollout, pretrained = config.rollout, model.generation_config
    is_sft = phase == Phase.sft
    model.generation_config = GenerationConfig(
        do_sample=True,
        max_new_tokens=config.sft.max_tokens if is_sft else rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p or None,
        bos_token_id=pretrained.bos_token_id,
        eos_token_id=pretrained.eos_token_id,
        pad_token_id=pretrained.pad_token_id,
    )


def save_export(
    context: RunContext,
    export: Export,
    folder: Path,
    *,
    what: str,
    answers: bool = True,
    example: str | None = None,
) -> None:
    """Write a model as a Hugging Face folder; every rank must call this function.

    ``what`` describes the model on its model card. If the model ``answers``, the card has an
    example call. A scorer is saved with a padding token that is not the end token, so that
    transformers reads its score at the end token. Its card has a call with ``example`` only if
    transformers alone can compute the score, without a base model and without further files.
    """
    tokenizer = context.tokenizer if answers else with_separate_padding(context.tokenizer)
    if context.ranks.is_main:
        made = f"Made by `rlhf` {installed_version('rlhf')}, run `{context.config.name}`"
        settings = f"seed {context.config.seed}; its config.yaml holds every setting"
        description = f"{what} {made}, {settings}."
        if answers:
            store_sampling_settings(export.model, context.config, phase=folder.parent.name)
            description += FENCED.format(_example_call(context, folder))
        else:
            description += " Pad batches on the right: with other padding GPT-2 gives wrong scores."
            export.model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
            if example is not None and export.save is save_from_stream and not export.write_more:
                model_folder = f"{folder.parent.name}/{folder.name}"
                description += FENCED.format(scorer_example(model_folder, example))
        rows = {str(p): (len(part.train), len(part.eval)) for p, part in context.parts.items()}
        description += origin_sections(context.run_dir, rows=rows)
        scorer = context.config.reward_model if folder.parent.name == Phase.reward else None
        base = scorer.path if scorer and scorer.path else context.config.model.path
        base = None if base is None or Path(base).exists() or base.count("/") != 1 else base
        save_model(
            folder,
            export.write,
            tokenizer,
            description=description,
            task="text-generation" if answers else "text-classification",
            base_model=base,
        )
    else:
        export.write(None)
    context.ranks.barrier()


def save_trained_model(
    context: RunContext,
    engine: Engine,
    folder: Path,
    *,
    source: ModelSource,
    what: str,
    answers: bool = True,
    example: str | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write an engine's model, trained from ``source``, in the form that the run's options select.

    ``write_more`` writes further files into the model's folder.
    """
    export = build_export(context.config, engine, source)._replace(write_more=write_more)
    save_export(context, export, folder, what=what, answers=answers, example=example)


def _example_call(context: RunContext, folder: Path) -> str:
    """Return the example code of a model card, which calls the model in ``folder``."""
    records = next(iter(context.parts.values())).eval if context.parts else []
    return python_example(
        f"{folder.parent.name}/{folder.name}",
        [record.prompt or "" for record in records],
        has_chat_template=context.tokenizer.chat_template is not None,
    )
