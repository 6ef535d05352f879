"""Build actors and scorers to train, with random weights, or from a folder or the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from rlhf.base.decoder_modules import CACHE_NAMES, end_token_ids
from rlhf.base.errors import CapabilityError, CheckpointError, ConfigError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.types import keep_parameter
from rlhf.config.choices import Device
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.kernels.cpu.cpu_layers import (
    MATMUL,
    attention_for_build,
    use_matmul_attention,
    use_onednn_products,
)
from rlhf.methods import Part, installed_methods, parts_of
from rlhf.models.language_model import Scorer
from rlhf.models.pretrained import (
    Shard,
    draw_weights_by_block,
    load_pretrained,
    require_trainable,
    shard_parameters,
)
from rlhf.models.sources import ModelSource
from rlhf.models.weight_files import require_finite_weights
from rlhf.options.fused_layers.keys import FusedLayers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# A function that extends a built model; the tuple is () or (name of the model's new head,).
Extension = Callable[["PreTrainedModel", tuple[str, ...]], None]

MOST_SHAPES = 1000  # maximum number of batch shapes (rows, padded width) to compile a layer for
# The config fields in which model families store their dropout probabilities.
DROPOUT_FIELDS = (
    "dropout attention_dropout hidden_dropout activation_dropout resid_pdrop embd_pdrop attn_pdrop "
    "classifier_dropout"
).split()
LAYERDROP = "layerdrop"  # OPT's probability to skip a whole layer; always set to 0


def find_model_extensions(config: RunConfig, role: Role, *, seed: int) -> list[Extension]:
    """Return the functions with which options extend the model of ``role`` after its build."""
    extensions: list[Extension] = []
    may_fuse = config.fused_layers is FusedLayers.auto and config.hardware.device is Device.cuda
    if may_fuse or config.fused_layers is FusedLayers.liger:
        from rlhf.options.fused_layers.liger_layers import select_fusing

        extensions += select_fusing(config, role)
    if config.lora.rank > 0:
        from rlhf.options.lora.models import extend_with_adapters

        extensions.append(partial(extend_with_adapters, config.lora, role, seed))
    return extensions


def build_actor(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    extensions: Sequence[Extension] = (),
    shard: Shard | None = None,
) -> PreTrainedModel:
    """Build a causal language model with fp32 weights and the tokenizer's special token ids.

    ``shard`` is called for every parameter as soon as it exists, and replaces it by a shard.

    Raises:
        CheckpointError: if the source holds no such model.
        ConfigError: if the architecture cannot be built, or cannot be extended.
        CapabilityError: if gradient checkpointing is enabled and the model does not support it.
    """
    from transformers import AutoModelForCausalLM

    model = _build_model(AutoModelForCausalLM, source, tokenizer, seed=seed, shard=shard)
    _apply_extensions(model, extensions, shard)
    return model


def build_scorer(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    extensions: Sequence[Extension] = (),
    shard: Shard | None = None,
) -> Scorer:
    """Build a one-label classification model in fp32 that returns a value at every position.

    If ``source`` is a language model, the head is new and drawn from ``seed``. ``extensions``,
    ``shard`` and errors are as in ``build_actor``.
    """
    from transformers import AutoModelForSequenceClassification

    auto_class = AutoModelForSequenceClassification
    scorer = Scorer(_build_model(auto_class, source, tokenizer, seed=seed, shard=shard))
    _apply_extensions(scorer.pretrained, extensions, shard, head=(scorer.head_name,))
    return scorer


def complete_reward_model(
    scorer: Scorer, source: ModelSource, keys: Mapping[str, Any]
) -> nn.Module:
    """Return the reward model of ``source``: ``scorer``, completed by an installed method.

    ``keys`` are the config keys, with values, of the run that trained the reward model.

    Raises:
        CheckpointError: if the folder holds weights that no installed method reads, or a method
            cannot complete the model.
    """
    model: nn.Module = scorer
    completions = parts_of(Completion, (method.reward_model() for method in installed_methods()))
    known = {"model.safetensors", "adapter_model.safetensors", *(each.file for each in completions)}
    for file in Path(source.path or "").glob("*.safetensors") if source.path is not None else ():
        if file.name not in known and not re.fullmatch(r"model-\d+-of-\d+\.safetensors", file.name):
            raise source.build_error(f"no installed package reads {file.name}; install its package")
    for completion in completions:
        model = completion.complete(model, source, keys)
    return model


class Completion(Part):
    """Base class of a method's loader, which completes a reward model from a file in its folder."""

    file: ClassVar[str]  # name of the file, NAME.safetensors

    def complete(
        self, scorer: nn.Module, source: ModelSource, keys: Mapping[str, Any]
    ) -> nn.Module:
        """Return the reward model of a run with these config ``keys``, built on ``scorer``.

        Raises CheckpointError if the folder does not hold what ``keys`` require.
        """
        raise NotImplementedError


def _apply_extensions(
    model: PreTrainedModel,
    extensions: Sequence[Extension],
    shard: Shard | None,
    *,
    head: tuple[str, ...] = (),
) -> None:
    """Extend ``model``, and shard new parameters; ``head`` is () or (name of a new head,)."""
    for extend in extensions:
        extend(model, head)
    if extensions and shard is not None:
        shard_parameters(model, shard)


def _build_model(
    auto_class: Any,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    shard: Shard | None,
) -> PreTrainedModel:
    from transformers import masking_utils

    # In each pass transformers would search for packed sequences, which makes the host wait.
    masking_utils.find_packed_sequence_indices = lambda _: None
    overrides = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "use_cache": True,
    }
    if auto_class.__name__ == "AutoModelForSequenceClassification":
        overrides["num_labels"] = 1
    with torch.random.fork_rng(devices=[]):  # random weights are drawn on the CPU
        torch.manual_seed(seed)
        if source.path is None:
            model = _build_random_model(auto_class, source, tokenizer, overrides, shard)
        else:
            model = load_pretrained(auto_class, source, overrides, mapped=shard is not None)
        _require_embeddings(model, tokenizer, source)
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            # A fixed seed: adapter folders hold no embeddings, so each load must draw equal rows.
            torch.manual_seed(0)
            for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
                if embeddings is not None:
                    # Convert to fp32 first: new rows are drawn in the dtype of the old rows.
                    embeddings.weight.data = embeddings.weight.data.float()
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if shard is not None:
        shard_parameters(model, shard, partial(require_finite_weights, source=source))
    if shard in (None, keep_parameter):
        _require_working_fields(model, source)
        use_onednn_products(model)
    if source.attention in (None, MATMUL):
        use_matmul_attention(model)
    set_dropout(model, source.dropout)
    if source.gradient_checkpointing:
        enable_gradient_checkpointing(model, source.gradient_checkpointing, key=source.key)
    if source.compiles:
        compile_layers(model, key=source.key)
    if model.can_generate():
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.generation_config.eos_token_id = _collect_end_ids(model, tokenizer, source)
    return model


def _collect_end_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: ModelSource
) -> int | list[int]:
    """Return the token ids that end a response: the tokenizer's and generation_config.json's."""
    ids, rows = end_token_ids(model), model.get_input_embeddings().num_embeddings
    if not all(isinstance(end, int) and 0 <= end < rows for end in ids):
        raise CheckpointError(
            f"{source.key}={source.path}: generation_config.json has eos_token_id={list(ids)}; "
            f"must be token ids from 0 to {rows - 1}; correct the file"
        )
    ends = list(dict.fromkeys([tokenizer.eos_token_id, *ids]))
    return ends if len(ends) > 1 else ends[0]


def _build_random_model(
    auto_class: Any,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    overrides: dict[str, Any],
    shard: Shard | None,
) -> PreTrainedModel:
    fields = {"bos_token_id": tokenizer.bos_token_id, "vocab_size": len(tokenizer)}
    fields |= dict(source.architecture or {}) | overrides
    require_trainable(fields, partial(_build_architecture_error, source.key, fields))
    config = architecture_config(source.key, fields)
    # Embeddings must be resized before they are sharded, so this model is built whole.
    is_whole = shard is None or config.vocab_size < len(tokenizer)
    with (
        translate_errors(partial(_build_architecture_error, source.key, fields)),
        nullcontext() if is_whole else draw_weights_by_block(shard),
    ):
        return auto_class.from_config(
            config, dtype=torch.float32, attn_implementation=attention_for_build(source.attention)
        )


def architecture_config(key: str, fields: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the transformers config built from ``fields``, the value of config key ``key``."""
    from transformers import AutoConfig

    other_fields = {name: value for name, value in fields.items() if name != "model_type"}
    with translate_errors(partial(_build_architecture_error, key, fields)):
        return AutoConfig.for_model(fields.get("model_type"), **other_fields)


def _build_architecture_error(key: str, fields: Mapping[str, Any], reason: str) -> ConfigError:
    return ConfigError(
        f"{key}: transformers cannot build a model of model_type={fields.get('model_type')!r} with "
        f"these fields: {reason}"
    )


def _require_embeddings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: ModelSource
) -> None:
    """Check that every token id has an embedding after a resize to ``len(tokenizer)`` rows."""
    rows = max(model.get_input_embeddings().num_embeddings, len(tokenizer))
    last = max(tokenizer.get_vocab().values())
    if last >= rows:
        raise CheckpointError(
            f"{source.key}={source.path}: the tokenizer has the token id {last}, but the model has "
            f"{rows} embeddings; use the tokenizer of this model"
        )


@torch.no_grad()
def _require_working_fields(model: PreTrainedModel, source: ModelSource) -> None:
    """Check, on two texts that differ in their last token, that the model runs and is causal.

    A config.json may have fields that fit the weights, but with which a forward pass fails. A model
    whose attention runs on a GPU only is not checked.
    """
    if source.attention not in (None, MATMUL, "sdpa", "eager"):
        return
    ids = [id_ for id_ in range(4) if id_ != model.config.pad_token_id]
    training = model.training

    def refuse(reason: str) -> ConfigError:
        place = source.key if source.path is None else f"{source.key}={source.path}, config.json"
        return ConfigError(f"{place}: no causal language model has these fields ({reason})")

    with translate_errors(refuse), _fp32_while_running(model):
        base = model.eval().base_model
        hidden_2SH = base(torch.tensor([ids[:2], ids[::2]]), use_cache=True)[0]
    model.train(training)
    first_H, again_H = hidden_2SH[:, 0]
    if not (first_H - again_H).abs().max() <= 1e-3 * first_H.abs().max():  # NaN too
        raise refuse("outputs depend on later tokens, or are NaN")


@contextmanager
def _fp32_while_running(model: nn.Module) -> Iterator[None]:
    """Give each module fp32 weights while it runs, one module at a time."""
    stored: dict[nn.Parameter, torch.Tensor] = {}

    def widen(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            stored[parameter], parameter.data = parameter.data, parameter.data.float()

    def restore(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = stored.pop(parameter)

    fp32 = {torch.float32}
    modules = [m for m in model.modules() if {p.dtype for p in m.parameters(recurse=False)} - fp32]
    hooks = [each.register_forward_pre_hook(widen) for each in modules]
    hooks += [each.register_forward_hook(restore) for each in modules]
    yield
    for hook in hooks:
        hook.remove()


def require_enough_positions(model: PreTrainedModel, tokens: int, *, key: str, wanted: str) -> None:
    """Raise ConfigError if keys ``wanted`` need more ``tokens`` than the model has positions."""
    limit = getattr(model.config, "max_position_embeddings", None)  # GPT-2's config has it too
    if limit is not None and tokens > limit:
        raise ConfigError(
            f"{wanted}={tokens}: the model of {key} has {limit} positions; "
            f"use {limit} or less, or a model with more"
        )


def enable_gradient_checkpointing(model: PreTrainedModel, layers: bool | int, *, key: str) -> None:
    """Enable gradient checkpointing in all layers (True) or in the first ``layers``.

    Raises:
        CapabilityError: if the model has no gradient checkpointing; the message names ``key``.
    """
    # transformers 5.23 renamed the method; earlier versions have only the old name.
    enable = getattr(model, "activation_checkpointing_enable", None)
    try:
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    except ValueError as error:
        raise CapabilityError(
            f"{key}: {type(model).__name__} has no gradient checkpointing ({error}); "
            "set gradient_checkpointing=false"
        ) from error
    if layers is not True:
        checkpointed = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
        for layer in [m for m in checkpointed if not hasattr(m, "config")][layers:]:
            layer.gradient_checkpointing = False
    # transformers makes the embeddings' output require gradients, for reentrant checkpointing only.
    # The backward pass would then also run through the frozen blocks of a shared trunk.
    model.disable_input_require_grads()


def compile_layers(model: PreTrainedModel, *, key: str, backend: str = "inductor") -> None:
    """Compile the layers of the model, once for each batch shape.

    Shapes are few: between each power of two and the next, batches are padded to eight widths. All
    layers share the compiled code. A call with a KV cache, which grows each step, runs uncompiled.

    Raises:
        CapabilityError: if the model does not name its layers; the message names ``key``.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise CapabilityError(
            f"{key}: the layers of {type(model).__name__} cannot be found; set compile=false"
        )
    # Beyond this limit torch.compile would run further shapes uncompiled and log a warning.
    torch._dynamo.config.recompile_limit = MOST_SHAPES
    torch._dynamo.config.accumulated_recompile_limit = MOST_SHAPES
    for layer in layers:
        layer.compile(backend=backend, dynamic=False)
        layer._compiled_call_impl = partial(
            _call_compiled_unless_kv_cache, layer._compiled_call_impl, layer._call_impl
        )


def _call_compiled_unless_kv_cache(
    compiled: Callable[..., Any], plain: Callable[..., Any], *inputs: Any, **options: Any
) -> Any:
    """Call ``compiled`` or, if the arguments include a KV cache, ``plain``."""
    has_cache = any(options.get(name) is not None for name in CACHE_NAMES)
    return (plain if has_cache else compiled)(*inputs, **options)


def set_dropout(model: PreTrainedModel, probability: float) -> None:
    """Set every dropout probability of the model, in its config and in the built modules.

    LayerDrop becomes 0: ranks that shard the weights would skip different layers.
    """
    probabilities = dict.fromkeys(DROPOUT_FIELDS, probability) | {LAYERDROP: 0.0}
    for name, value in probabilities.items():
        if isinstance(model.config.to_dict().get(name), float):
            setattr(model.config, name, value)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = probability
        for name in ("dropout", "attention_dropout", "activation_dropout", LAYERDROP):
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, probabilities[name])
