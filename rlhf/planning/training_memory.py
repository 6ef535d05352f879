"""Compute the peak bytes of a training pass, with gradients and logits, at its moments."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from rlhf.models.model_uses import ModelUse
from rlhf.planning.memory_model import SINGLE, Parts, layer_activation_bytes, logit_bytes


class PassMoments(NamedTuple):
    """The bytes by purpose while a backward pass is in the head, the layers and the embedding."""

    head: Parts
    layers: Parts
    """In the last layer, while all other layers still have their activations."""
    embedding: Parts


def backward_pass_moments(
    model: ModelUse,
    *,
    tokens: int,
    positions: int,
    size: int,
    activations: int,
    gradients: int,
    is_first: bool,
    is_gpu: bool,
) -> PassMoments:
    """Return the bytes by purpose at the moments that can be the peak of a backward pass.

    ``tokens`` and ``positions`` (tokens with logits) are counted over all sequences.
    ``activations`` are the bytes stored for the pass; ``gradients`` are the bytes of all weight
    gradients. In the first pass of a step (``is_first``), gradients are allocated while activations
    are freed. On a CPU, temporary gradients fit into the freed memory that the process keeps.
    """
    head, hidden, layer = (
        slope(model, tokens=tokens, positions=positions, size=size) if is_gpu else 0
        for slope in (head_gradient_bytes, hidden_gradient_bytes, layer_gradient_bytes)
    )
    # No checkpointed layer is recomputed while there are logits.
    again = _layer_activation_bytes(model, tokens, size) if is_gpu and model.checkpointed else 0
    before = 0 if is_first else gradients
    # Autograd keeps the gradient of a tied head until it is added to the embedding's gradient.
    tied = 0 if model.shape.head else head
    return PassMoments(
        head=Counter(
            gradients=before + head,
            activations=activations - again + hidden,
            logits=logit_bytes(model, positions=positions, size=size, is_gpu=is_gpu),
        ),
        layers=Counter(
            gradients=before + (head if is_first else tied), activations=activations + layer
        ),
        embedding=Counter(gradients=gradients + (tied if is_first else 2 * tied)),
    )


def _layer_activation_bytes(model: ModelUse, tokens: int, size: int) -> int:
    """Return the bytes of activations that one layer stores for its backward pass on a GPU."""
    return round(
        layer_activation_bytes(model.shape, tokens, size=size, uses_matmul_attention=False)
    )


def head_gradient_bytes(model: ModelUse, *, size: int, **_: int) -> int:
    """Return the bytes of the output layer's weight gradient; 0 if the layer is not trained."""
    shape = model.shape
    weights = shape.vocab * shape.embedding
    is_trained = not model.is_scorer and model.trained - model.extra_weights >= weights
    return weights * size * is_trained


def hidden_gradient_bytes(model: ModelUse, *, positions: int, **_: int) -> int:
    """Return the bytes of the gradient of the output layer's inputs, which is summed in fp32."""
    return 0 if model.is_scorer else positions * model.shape.embedding * SINGLE


def layer_gradient_bytes(model: ModelUse, *, tokens: int, size: int, **_: int) -> int:
    """Return the bytes of activation gradients that the backward pass of one layer holds at once.

    They are the gradients of the activation function's input and output, and of the layer's output.
    """
    return tokens * (2 * model.shape.ffn + model.shape.hidden) * size
