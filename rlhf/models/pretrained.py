"""Load a model from a folder or the hub, and check that its weights match its config.json.

A ``Shard`` function shards weights, or sends them to the device, one at a time. A folder's weights
are then memory-mapped: every rank reads only the part that it keeps. Random weights are then drawn
block by block, in the order of an ordinary build, so that they have the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf.base.errors import CheckpointError, RlhfError
from rlhf.base.foreign_errors import translate_errors
from rlhf.kernels.cpu.cpu_layers import attention_for_build
from rlhf.models.adapter_folders import load_adapter_config, merge_adapter
from rlhf.models.sources import ModelSource
from rlhf.models.weight_files import (
    CONSTANTS,
    require_finite_weights,
    stored_dtype,
    stored_tensor_dtypes,
    summarize_names,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Fields of config.json that count modules; MOST_MODULES is their largest allowed value.
# With a huge value transformers would build modules for hours before any shape is compared.
COUNTS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_labels"}
COUNTS |= {"encoder_layers", "decoder_layers"}
MOST_MODULES = 1000
OUTPUT_LAYERS = {"lm_head", "embed_out"}  # names of output layers; scorers have none
# A function that replaces a parameter with this rank's shard (possibly the whole parameter) and
# returns the shard in the engine's precision; it returns None if the parameter is already sharded.
Shard = Callable[[nn.Parameter], Tensor | None]


@contextmanager
def draw_weights_by_block(shard: Shard | None = None) -> Iterator[None]:
    """Make transformers draw random weights in fp32 for models that are built in this context.

    With ``shard`` the whole model is never in memory. Each module's memory is freed as soon as the
    module is constructed. Each block (element of a ModuleList) gets memory again when its weights
    are drawn, and is then sharded. The values equal those of an ordinary build, since random
    numbers are drawn in the same order.
    """
    from transformers import PreTrainedModel

    drawn: set[nn.Parameter] = set()
    within_blocks: set[nn.Module] = set()
    initialize = PreTrainedModel._initialize_weights

    def free_parameters(parent: nn.Module, _: str, module: nn.Module | None) -> None:
        for each in () if module is None else module.modules():
            for name, parameter in each.named_parameters(recurse=False):
                if parameter not in drawn:
                    each._parameters[name] = nn.Parameter(parameter.to("meta"))
            if isinstance(parent, nn.ModuleList) and each is not module:
                within_blocks.add(each)

    def draw_and_shard(model: PreTrainedModel, module: nn.Module, *args: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in drawn and not _is_loaded(parameter):
                empty = torch.empty(parameter.shape, dtype=torch.float32)
                module._parameters[name] = nn.Parameter(empty)
                drawn.add(module._parameters[name])  # type: ignore[arg-type]
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and not _is_loaded(buffer):
                module._buffers[name] = buffer.float()
        initialize(model, module, *args)
        if shard is not None and module not in within_blocks:
            for parameter in module.parameters():
                shard(parameter)

    PreTrainedModel._initialize_weights = draw_and_shard
    register = nn.modules.module.register_module_module_registration_hook
    handle = None if shard is None else register(free_parameters)
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = initialize
        if handle is not None:
            handle.remove()


def _is_loaded(tensor: Tensor) -> bool:
    """Return True if transformers marked ``tensor`` as loaded, or as tied to a loaded tensor."""
    return getattr(tensor, "_is_hf_initialized", False)


def shard_parameters(
    model: PreTrainedModel, shard: Shard, check: Callable[[str, Tensor], None] | None = None
) -> None:
    """Shard all parameters that are not sharded yet, one at a time.

    ``check`` is called with the name of each parameter and with this rank's shard.
    """
    for name, parameter in model.named_parameters():
        part = shard(parameter)
        if check is not None and part is not None:
            check(name, part)


class Adapter(NamedTuple):
    """An adapter to merge into its base model: the place where it is stored, and its config."""

    source: ModelSource
    config: Any


def load_pretrained(
    auto_class: Any, source: ModelSource, overrides: Mapping[str, Any], *, mapped: bool
) -> PreTrainedModel:
    """Load the model of a folder or hub id; merge an adapter into its base model.

    Weights are in fp32 and checked for NaN. With ``mapped``, the weights of a model without
    adapters are memory-mapped in the dtype of the file, and not checked.

    Raises:
        CheckpointError: if there is no such model, or its weights do not match its config.json.
    """
    adapters, base = find_adapter_chain(source)
    # Adapters' base model is loaded in fp32: merging in half precision would round the adapter.
    model = _load_base_model(auto_class, base, overrides, mapped=mapped and not adapters)
    for adapter_source, config in reversed(adapters):
        model = merge_adapter(model, adapter_source, config)
    if not mapped or adapters:
        for name, weights in model.named_parameters():  # named_parameters yields tied weights once
            require_finite_weights(name, weights.detach(), source)
    return model


def find_adapter_chain(source: ModelSource) -> tuple[list[Adapter], ModelSource]:
    """Return the adapters of ``source``, from the last to the first trained, and their base model.

    Raises:
        CheckpointError: if an adapter cannot be used, or is part of its own base.
    """
    adapters: list[Adapter] = []
    while (config := _read_adapter_config(source)) is not None:
        if any(source.path == each.source.path for each in adapters):
            raise CheckpointError(
                f"{source.key}={source.path} is an adapter on itself; set base_model_name_or_path "
                "in adapter_config.json to the base of the training run"
            )
        adapters.append(Adapter(source, config))
        source = replace(
            source,
            key=f"{source.key}={source.path}, base_model_name_or_path",
            path=config.base_model_name_or_path,
            revision=config.revision,
            # Only the adapter's file names this base: the user has not declared it trusted.
            trust_remote_code=False,
        )
    return adapters, source


def load_config(source: ModelSource, **overrides: Any) -> PreTrainedConfig:
    """Return the transformers config of ``source``, with the fields in ``overrides`` replaced.

    Raises:
        CheckpointError: if there is no config, or it is of a model that cannot be trained.
    """
    from transformers import AutoConfig, PreTrainedConfig

    with translate_errors(source.build_error):
        fields, _ = PreTrainedConfig.get_config_dict(source.path, revision=source.revision)
        require_trainable(fields, source.build_error)
        return AutoConfig.from_pretrained(
            source.path,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
            **overrides,
        )


def load_classifier(source: ModelSource, shard: Shard | None) -> PreTrainedModel:
    """Load a trained sequence-classification model with the labels that it has.

    ``shard`` and errors are as in ``build_actor``.
    """
    from transformers import AutoModelForSequenceClassification

    overrides, is_mapped = {"use_cache": False}, shard is not None
    model = load_pretrained(AutoModelForSequenceClassification, source, overrides, mapped=is_mapped)
    if shard is not None:
        shard_parameters(model, shard, partial(require_finite_weights, source=source))
    return model


def check_classifier(source: ModelSource) -> PreTrainedModel:
    """Return a trained sequence-classification model on the meta device, without its weights.

    Raises:
        CheckpointError: if the files do not hold such a model, with all its weights.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = load_config(source)
    if not _is_scorer(config):
        raise CheckpointError(
            f"{source.key}={source.path} is not a trained reward model or classifier: config.json "
            f"has architectures={config.architectures}; must be a ForSequenceClassification model"
        )
    auto_class = AutoModelForSequenceClassification
    return _load_base_model(auto_class, source, {}, mapped=True, weightless=True)


def require_one_label_model(source: ModelSource) -> None:
    """Raise CheckpointError unless ``source`` has the config of a reward model with one label."""
    with translate_errors(partial(source.build_error, what="a reward model")):
        adapter = _read_adapter_config(source)
    if adapter is not None and (adapter.task_type != "SEQ_CLS" or not adapter.modules_to_save):
        raise CheckpointError(
            f"{source.key}={source.path} is not a trained reward model: adapter_config.json has "
            f"task_type={adapter.task_type} and modules_to_save={adapter.modules_to_save}; must "
            "have task_type=SEQ_CLS and a saved head. Train a reward model with phase=reward"
        )
    config = None if adapter is not None else load_config(source)
    if config is not None and (config.num_labels != 1 or not _is_scorer(config)):
        raise CheckpointError(
            f"{source.key}={source.path} is not a trained reward model: config.json has "
            f"architectures={config.architectures} and {config.num_labels} labels; must be a "
            "ForSequenceClassification model with 1 label. Train a reward model with phase=reward, "
            f"or let a model with more labels score text: 'rewards.NAME={{kind: scorer, path: "
            f"{source.path}}}' instead of reward_model.path"
        )


def _read_adapter_config(source: ModelSource) -> Any | None:
    with translate_errors(source.build_error):
        return load_adapter_config(source)


def _is_scorer(config: PreTrainedConfig) -> bool:
    return "SequenceClassification" in str(config.architectures)


def _load_base_model(
    auto_class: Any,
    source: ModelSource,
    overrides: Mapping[str, Any],
    *,
    mapped: bool,
    weightless: bool = False,
) -> PreTrainedModel:
    config = load_config(source, **overrides)
    with translate_errors(source.build_error):
        dtype = stored_dtype(source) if mapped else torch.float32
        stored_tensor_dtypes(source)
        load = partial(
            auto_class.from_pretrained,
            source.path,
            config=config,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
            dtype=dtype,
            use_safetensors=True,
            attn_implementation=attention_for_build(source.attention),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # _require_matching_tensors compares shapes
        )
        # Load on the meta device first: tensors that do not match the files could be huge.
        model, loading_info = load(device_map="meta")
        _require_matching_tensors(model, loading_info, source)
        if weightless:
            return model
        with draw_weights_by_block() if mapped else nullcontext():
            loaded: PreTrainedModel = load()[0]
            return loaded


def require_trainable(fields: Mapping[str, Any], refuse: Callable[[str], RlhfError]) -> None:
    """Raise ``refuse(reason)`` for huge counts, or quantized or redirected weights, in a config."""
    pending: list[Any] = [fields]
    while pending:
        each = pending.pop()
        for key, value in each.items() if isinstance(each, Mapping) else ():
            pending.append(value)
            if key in COUNTS and isinstance(value, int) and value > MOST_MODULES:
                raise refuse(f"its config has {key}={value}; must be {MOST_MODULES} or less")
            if key == "quantization_config" and value:
                method = value.get("quant_method") if isinstance(value, Mapping) else value
                raise refuse(
                    f"its weights are quantised ({method}), which cannot be trained: use the "
                    "unquantised model that it was made from"
                )
            if key == "transformers_weights" and value:
                raise refuse(f"its config has {key}={value!r}; remove that field")


def _require_matching_tensors(
    model: PreTrainedModel, loading_info: Mapping[str, Any], source: ModelSource
) -> None:
    """Check that the files hold all tensors of ``model``, and no others, in the same shapes.

    A scorer that starts from a language model has a new head and no output layer: both are allowed.
    """
    missing = set(loading_info["missing_keys"])
    unexpected = {n for n in loading_info["unexpected_keys"] if not CONSTANTS.search(n)}
    if not model.can_generate():
        unexpected = {n for n in unexpected if n.partition(".")[0] not in OUTPUT_LAYERS}
        if not _is_scorer(model.config):
            missing = {n for n in missing if n.startswith(f"{model.base_model_prefix}.")}
    shapes = [
        f"{name} {_format_shape(stored)} in the file, but {_format_shape(expected)} in config.json"
        for name, stored, expected in loading_info["mismatched_keys"]
    ]
    faults = {"missing": missing, "not in the model": unexpected, "of another shape": shapes}
    if any(faults.values()):
        differences = "; ".join(f"{what}: {summarize_names(n)}" for what, n in faults.items() if n)
        raise CheckpointError(
            f"{source.key}={source.path} does not hold the model that its config.json describes: "
            f"{differences}. Use the config.json that was saved with these weights, or get the "
            "whole folder again"
        )


def _format_shape(shape: torch.Size) -> str:
    return f"({', '.join(map(str, shape))})"
