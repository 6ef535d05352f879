"""Build the four models: random, from a folder or the hub, or from this run's SFT model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhf.config.choices import ModelInit
from rlhf.config.schema.model import ModelConfig
from rlhf.errors import CheckpointError, ConfigError
from rlhf.models import load_checks
from rlhf.models.attention import MATMUL, own_attention, use_matmul_attention
from rlhf.models.lora import LoraSpec, adapter_config, adapter_weights, add_adapters, merge_adapter
from rlhf.models.scorer import Scorer
from rlhf.models.train_settings import checkpoint_gradients, set_dropout
from rlhf.models.zero3_init import Shard, drawn_in_blocks, shard_parameters, stored_dtype
from rlhf.user_paths import user_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MOST_ADAPTERS = 8  # one on top of the other


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The place of a model's weights; ``key`` is the config key that errors about it name."""

    key: str
    path: str | None
    revision: str | None = None
    architecture: dict[str, Any] | None = None
    attention: str | None = None
    dropout: float = 0.0
    gradient_checkpointing: bool | int = False  # a number: only in that many first layers
    trust_remote_code: bool = False

    @classmethod
    def of(cls, model: ModelConfig, *, key: str, dropout: float = 0.0) -> ModelSource:
        """Return the source that ``model`` describes; ``path`` is None if weights are random."""
        is_random = model.init is ModelInit.random
        place = None if is_random else model.path
        return cls(
            key=f"{key}.architecture" if is_random else f"{key}.path",
            path=place and str(user_path(place, key=f"{key}.path")),
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
        """Return the source of a model that an earlier phase of the run made from ``base``."""
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
    """Build a causal language model with fp32 weights and the tokenizer's special token ids.

    With ``shard`` every parameter is sharded as soon as it exists.

    Raises:
        CheckpointError: if the source holds no such model.
        ConfigError: if the architecture cannot be built, or has no layers that ``lora`` names.
        CapabilityError: if gradient checkpointing is enabled and the model does not support it.
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
    """Build a one-label sequence-classification model in fp32 that is read at every position.

    If it starts from a language model, its head is new and drawn from ``seed``. With ``lora`` the
    head is trained beside the adapters. ``shard`` works as in ``build_actor``.

    Raises:
        CheckpointError, ConfigError, CapabilityError: as in ``build_actor``.
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
    """Check that the model of a folder is a reward model with one label.

    Raises:
        CheckpointError: if its config describes another model, or there is no config.
    """
    from transformers import AutoConfig

    with load_checks.loading(path, key="reward_model.path", what="a reward model"):
        adapter = adapter_config(str(path))
        if adapter is not None:
            _require_adapter_of_a_scorer(path, adapter)
            return
        config = AutoConfig.from_pretrained(str(path))
    names = config.architectures or []
    if config.num_labels != 1 or "SequenceClassification" not in str(names):
        raise CheckpointError(
            f"reward_model.path={path} is not a trained reward model: config.json has "
            f"architectures={names} and {config.num_labels} labels; must be a "
            "ForSequenceClassification model with 1 label. Train a reward model with phase=reward"
        )


def _require_adapter_of_a_scorer(path: str | Path, adapter: Any) -> None:
    if adapter.task_type != "SEQ_CLS" or not adapter.modules_to_save:
        raise CheckpointError(
            f"reward_model.path={path} is not a trained reward model: adapter_config.json has "
            f"task_type={adapter.task_type} and modules_to_save={adapter.modules_to_save}; must "
            "have task_type=SEQ_CLS and a saved head. Train a reward model with phase=reward"
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
            # A fixed seed: adapter folders hold no embeddings, so loading must draw equal new rows.
            torch.manual_seed(0)
            for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
                if embeddings is not None:
                    # fp32 first: new rows are drawn in the dtype of the old rows.
                    embeddings.weight.data = embeddings.weight.data.float()
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
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    fields = {"bos_token_id": tokenizer.bos_token_id, "vocab_size": len(tokenizer)}
    fields |= dict(source.architecture or {}) | overrides
    model_type = fields.pop("model_type", None)
    try:
        config = AutoConfig.for_model(model_type, **fields)
        # Embeddings that will be resized must be drawn whole, before anything is sharded.
        is_whole = shard is None or config.vocab_size < len(tokenizer)
        with nullcontext() if is_whole else drawn_in_blocks(shard):
            return auto_class.from_config(
                config, dtype=torch.float32, attn_implementation=own_attention(source.attention)
            )
    except (KeyError, TypeError, ValueError, OverflowError, StrictDataclassError) as error:
        raise ConfigError(
            f"{source.key}: transformers cannot build a {auto_class.__name__} of "
            f"model_type={model_type!r} with these fields: {' '.join(str(error).split())}"
        ) from error


def _from_pretrained(
    auto_class: Any,
    source: ModelSource,
    path: str,
    overrides: dict[str, Any],
    *,
    mapped: bool,
) -> PreTrainedModel:
    """Load the model of a folder or hub id; an adapter is merged into its base model.

    Its weights are fp32, or, if ``mapped``, memory-mapped in the dtype of the file.
    """
    with load_checks.loading(path, key=source.key, what="a model"):
        adapter = adapter_config(path, source.revision)
        if adapter is not None:
            return _over_its_base(auto_class, source, path, overrides, adapter=adapter)
        load_checks.check_files(Path(path), key=source.key)
        dtype = stored_dtype(path, source.revision) if mapped else torch.float32
        with drawn_in_blocks() if mapped else nullcontext():
            model, report = auto_class.from_pretrained(
                path,
                revision=source.revision,
                trust_remote_code=source.trust_remote_code,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation=own_attention(source.attention),
                ignore_mismatched_sizes=True,  # the report names them; without it nothing does
                output_loading_info=True,
                **overrides,
            )
        load_checks.check_weights(model, report, key=source.key, place=path)
    return model


def _over_its_base(
    auto_class: Any, source: ModelSource, path: str, overrides: dict[str, Any], *, adapter: Any
) -> PreTrainedModel:
    place = adapter.base_model_name_or_path
    if source.key.count("base_model_name_or_path") == MOST_ADAPTERS:
        raise CheckpointError(f"{source.key}: adapters name one another as their base")
    key = f"{source.key}={path}, base_model_name_or_path"
    # The adapter's file names the base, not the user, who may have allowed code of the adapter.
    base_source = replace(source, key=key, revision=adapter.revision, trust_remote_code=False)
    # Load the base whole and in fp32: merging in half precision would round the adapter.
    base = _from_pretrained(auto_class, base_source, place, overrides, mapped=False)

    # Read outside of ``merging``: a file that is missing is no misfit.
    weights = adapter_weights(path, source.revision)
    with load_checks.merging(path, key=source.key, base=place):
        merged = merge_adapter(base, path, adapter, weights)
    load_checks.check_finite(merged, key=source.key, place=path)
    return merged


def require_positions(model: PreTrainedModel, tokens: int, *, key: str, wanted: str) -> None:
    """Check that the model has positions for ``tokens`` tokens, the value of config key ``wanted``.

    Raises:
        ConfigError: if the model has fewer positions; a model without a limit takes any number.
    """
    limit = getattr(model.config, "max_position_embeddings", None)  # a property of GPT-2's config
    if limit is not None and tokens > limit:
        raise ConfigError(
            f"{wanted}={tokens}: the model of {key} has {limit} positions; "
            f"use {limit} or less, or a model with more"
        )
