"""Training settings of a built model: gradient checkpointing, compiled layers and dropout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rlhf.base.errors import CapabilityError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_SHAPES = 1000  # most batch shapes (micro-batch size, padded width) to compile a layer for
# The config fields in which model families store their dropout probabilities.
DROPOUT_FIELDS = (
    "dropout",
    "attention_dropout",
    "hidden_dropout",
    "activation_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "classifier_dropout",
    "layerdrop",
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
    # transformers makes the embeddings' output require gradients, which only reentrant
    # checkpointing needs: the backward pass would also run through a shared trunk's frozen blocks.
    model.disable_input_require_grads()


def compile_layers(model: PreTrainedModel, *, key: str, backend: str = "inductor") -> None:
    """Compile the layers of the model, once for each batch shape.

    Batches are padded to eight widths per doubling, so there are few shapes. All layers share the
    compiled code. A call with a KV cache, whose shape changes in each step, runs uncompiled.

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
            _call_unless_cached, layer._compiled_call_impl, layer._call_impl
        )


def _call_unless_cached(
    compiled: Callable[..., Any], plain: Callable[..., Any], *inputs: Any, **options: Any
) -> Any:
    return (compiled if options.get("past_key_values") is None else plain)(*inputs, **options)


def set_dropout(model: PreTrainedModel, probability: float) -> None:
    """Set every dropout probability of the model, in its config and in the built modules."""
    for name in DROPOUT_FIELDS:
        if isinstance(model.config.to_dict().get(name), float):
            setattr(model.config, name, probability)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = probability
        for name in ("dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, probability)
