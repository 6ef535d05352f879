"""Building the four models: random, from a folder or the hub, or from this run's SFT model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhf.config.choices import ModelInit
from rlhf.config.schema import ModelConfig
from rlhf.errors import CheckpointError, ConfigError
from rlhf.models.attention import MATMUL, own_attention, use_matmul_attention
from rlhf.models.lora import LoraSpec, adapter_config, add_adapters, merge_adapter
from rlhf.models.scorer import Scorer
from rlhf.models.sharded import Shard, drawn_in_blocks, shard_parameters, stored_dtype
from rlhf.models.sources import explain_load_failure
from rlhf.models.training import checkpoint_gradients, set_dropout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model's weights are; ``key`` is the config key to name when they are not there."""

    key: str
    path: str | None
    revision: str | None = None
    architecture: dict[str, Any] | None = None
    attention: str | None = None
    dropout: float = 0.0
    gradient_checkpointing: bool | int = False  # a number: of the first layers
    trust_remote_code: bool = False

    @classmethod
    def of(cls, model: ModelConfig, *, key: str, dropout: float = 0.0) -> ModelSource:
        """The source that a config asks for; ``path`` is None where weights are random."""
        is_random = model.init is ModelInit.random
        return cls(
            key=f"{key}.architecture" if is_random else f"{key}.path",
            path=None if is_random else model.path,
            revision=model.revision,
            architecture=model.architecture if is_random else None,
            attention=model.attention,
            dropout=dropout,
            gradient_checkpointing=model.gradient_checkpointing,
            trust_remote_code=model.trust_remote_code,
        )

    @classmethod
    def folder(
        cls,
        folder: Path,
        *,
        base: ModelConfig,
        gradient_checkpointing: bool | int = False,
        dropout: float = 0.0,
    ) -> ModelSource:
        """A model that an earlier phase of the run made from ``base``."""
        return cls(
            key="model folder",
            path=str(folder),
            attention=base.attention,
            dropout=dropout,
            gradient_checkpointing=gradient_checkpointing,
            trust_remote_code=base.trust_remote_code,
        )


def build_actor(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    lora: LoraSpec | None = None,
    shard: Shard | None = None,
) -> PreTrainedModel:
    """A causal language model with fp32 weights that knows the tokenizer's special tokens.

    With ``shard`` every parameter is sharded as soon as it is there.

    Raises:
        CheckpointError: the source holds no such model.
        ConfigError: the architecture cannot be built, or has no layers that ``lora`` names.
        CapabilityError: the model has no gradient checkpointing, and it was asked for.
    """
    from transformers import AutoModelForCausalLM

    model = _build(AutoModelForCausalLM, source, tokenizer, seed=seed, shard=shard)
    if lora is not None:
        add_adapters(model, lora, seed=seed)
        if shard is not None:
            shard_parameters(model, shard)
    return model


def build_scorer(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    lora: LoraSpec | None = None,
    shard: Shard | None = None,
) -> Scorer:
    """A sequence-classification model with one label, read at every position, in fp32.

    Started from a language model its head is new, drawn from ``seed``. With ``lora`` the head is
    trained beside the adapters; ``shard`` as for ``build_actor``.

    Raises:
        CheckpointError, ConfigError, CapabilityError: as ``build_actor``.
    """
    from transformers import AutoModelForSequenceClassification

    auto_class = AutoModelForSequenceClassification
    scorer = Scorer(_build(auto_class, source, tokenizer, seed=seed, shard=shard))
    if lora is not None:
        add_adapters(scorer.pretrained, lora, seed=seed, trained=(scorer.head_name,))
        if shard is not None:
            shard_parameters(scorer.pretrained, shard)
    return scorer


def require_trained_head(path: str | Path) -> None:
    """Refuse a folder whose model is not a reward model with one label.

    Raises:
        CheckpointError: its config says otherwise, or there is none.
    """
    from transformers import AutoConfig

    try:
        adapter = adapter_config(str(path))
        if adapter is not None:
            _require_adapter_of_a_scorer(path, adapter)
            return
        config = AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise explain_load_failure(
            path, key="reward_model.path", what="a reward model", error=error
        ) from error
    names = config.architectures or []
    if config.num_labels != 1 or not any("SequenceClassification" in name for name in names):
        raise CheckpointError(
            f"reward_model.path={path} is no trained reward model: its config names {names} with "
            f"{config.num_labels} labels, where a ForSequenceClassification model with one is "
            "needed. Train one with phase=reward"
        )


def _require_adapter_of_a_scorer(path: str | Path, adapter: Any) -> None:
    if adapter.task_type != "SEQ_CLS" or not adapter.modules_to_save:
        raise CheckpointError(
            f"reward_model.path={path} is no trained reward model: its adapter_config.json has "
            f"task_type={adapter.task_type} and modules_to_save={adapter.modules_to_save}, where "
            "SEQ_CLS and a head are needed. Train one with phase=reward"
        )


def _build(
    auto_class: Any,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    shard: Shard | None,
) -> PreTrainedModel:
    overrides = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "use_cache": True,
    }
    if auto_class.__name__ == "AutoModelForSequenceClassification":
        overrides["num_labels"] = 1
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if source.path is None:
            model = _from_architecture(auto_class, source, tokenizer, overrides, shard)
        else:
            is_mapped = shard is not None
            model = _from_pretrained(auto_class, source, source.path, overrides, mapped=is_mapped)
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            # An adapter's folder holds no embeddings: new ones must come back when it is loaded.
            torch.manual_seed(0)
            for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
                if embeddings is not None:
                    embeddings.weight.data = embeddings.weight.data.float()  # new rows are drawn so
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if shard is not None:
        shard_parameters(model, shard)
    if source.attention in (None, MATMUL):
        use_matmul_attention(model)
    set_dropout(model, source.dropout)
    if source.gradient_checkpointing:
        checkpoint_gradients(model, source.gradient_checkpointing, key=source.key)
    if model.can_generate():
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def _from_architecture(
    auto_class: Any,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    overrides: dict[str, Any],
    shard: Shard | None,
) -> PreTrainedModel:
    from transformers import AutoConfig

    fields = {"bos_token_id": tokenizer.bos_token_id, "vocab_size": len(tokenizer)}
    fields |= dict(source.architecture or {}) | overrides
    model_type = fields.pop("model_type", None)
    try:
        config = AutoConfig.for_model(model_type, **fields)
        # Embeddings that are about to grow are drawn and enlarged whole.
        is_whole = shard is None or config.vocab_size < len(tokenizer)
        with nullcontext() if is_whole else drawn_in_blocks(shard):
            return auto_class.from_config(
                config, dtype=torch.float32, attn_implementation=own_attention(source.attention)
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{source.key}: transformers cannot build a {auto_class.__name__} of "
            f"model_type={model_type!r} with these fields: {error}"
        ) from error


def _from_pretrained(
    auto_class: Any,
    source: ModelSource,
    path: str,
    overrides: dict[str, Any],
    *,
    mapped: bool,
) -> PreTrainedModel:
    """The model of a folder or hub id; that of an adapter is merged into its base.

    Its weights are fp32, but as they lie in the file where they are to be ``mapped``.
    """
    try:
        adapter = adapter_config(path, source.revision)
        if adapter is not None:
            return _over_its_base(auto_class, source, path, overrides, adapter=adapter)
        dtype = stored_dtype(path, source.revision) if mapped else torch.float32
        with drawn_in_blocks() if mapped else nullcontext():
            return auto_class.from_pretrained(
                path,
                revision=source.revision,
                trust_remote_code=source.trust_remote_code,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation=own_attention(source.attention),
                **overrides,
            )
    except (OSError, ValueError) as error:
        raise explain_load_failure(path, key=source.key, what="a model", error=error) from error


def _over_its_base(
    auto_class: Any, source: ModelSource, path: str, overrides: dict[str, Any], *, adapter: Any
) -> PreTrainedModel:
    place = adapter.base_model_name_or_path
    key = f"{source.key}={path}, base_model_name_or_path"
    base_source = replace(source, key=key, revision=adapter.revision)
    # Whole in memory, in fp32: merged in half precision the adapter would be rounded.
    base = _from_pretrained(auto_class, base_source, place, overrides, mapped=False)
    try:
        return merge_adapter(base, path, adapter, source.revision)
    except ValueError as error:
        raise CheckpointError(
            f"{source.key}={path}: the adapter does not fit its base {place} ({error}); "
            "name in adapter_config.json the base that it was trained on"
        ) from error


def require_positions(model: PreTrainedModel, tokens: int, *, key: str, wanted: str) -> None:
    """Refuse sequences of ``tokens`` tokens, asked for by ``wanted``, beyond the model's positions.

    Raises:
        ConfigError: the model has fewer; a model without a limit takes any.
    """
    limit = getattr(model.config, "max_position_embeddings", None)  # GPT-2 has it as a property
    if limit is not None and tokens > limit:
        raise ConfigError(
            f"{wanted}={tokens}: the model of {key} has {limit} positions; "
            f"use {limit} or less, or a model with more"
        )
