"""What is set on a model, once it is there, for how it is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf.errors import CapabilityError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The names under which model families keep their dropout probabilities.
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


def checkpoint_gradients(model: PreTrainedModel, layers: bool | int, *, key: str) -> None:
    """Have all layers, or the first ``layers``, compute activations again; ``key`` asked for it.

    Raises:
        CapabilityError: the model cannot.
    """
    # transformers 5.23 renamed it; earlier ones know the old name alone.
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
    # transformers makes the embeddings' output require gradients, which the older, reentrant way
    # needs: here it would run the backward pass through the frozen blocks of a shared trunk too.
    model.disable_input_require_grads()


def set_dropout(model: PreTrainedModel, probability: float) -> None:
    """Set every dropout of the model, in its config and in the modules already built."""
    for name in DROPOUT_FIELDS:
        if isinstance(model.config.to_dict().get(name), float):
            setattr(model.config, name, probability)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = probability
        for name in ("dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, probability)
