"""Count the weights of a model from the fields of its Hugging Face config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from rlhf.config.schema.model import ModelConfig
from rlhf.models.sources import config_fields


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a decoder; ``matrices`` are (inputs, outputs) of one layer's linear layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    is_gated: bool
    wide_copies: int
    """Number of values per feed-forward unit that autograd saves for the backward pass."""
    vocab: int
    matrices: tuple[tuple[int, int], ...]
    layer_vectors: int
    """Weights of the biases and norms of one layer."""
    outside: int
    """Number of weights outside the layers and an untied head: embeddings, norm, projections."""
    tail: int
    """Number of those weights between the last layer and the head: norm, projection."""
    head: int
    """Weights of a head that is not tied to the embedding."""
    embedding: int
    """Width of the embedding, and of the input of the head."""
    norms: int = 2
    """Number of norms over the hidden state in one layer."""
    has_rms_norms: bool = False
    """True if norms are RMSNorm, False if LayerNorm."""
    norms_heads: bool = False
    """True if queries and keys have norms."""
    keeps_scores: bool = False
    """True if only eager attention works, which saves (tokens, tokens) probabilities per head."""

    @cached_property
    def weights_per_layer(self) -> int:
        """Return the number of weights of one layer."""
        return sum(i * o for i, o in self.matrices) + self.layer_vectors

    @cached_property
    def weights(self) -> int:
        """Return the number of weights of the language model."""
        return self.layers * self.weights_per_layer + self.outside + self.head

    @cached_property
    def scorer_weights(self) -> int:
        """Return the number of weights of a reward model or critic, whose head has one output."""
        return self.layers * self.weights_per_layer + self.outside + self.embedding

    @cached_property
    def linear_layer_weights(self) -> int:
        """Return the number of weights in the linear layers, without the head."""
        inner = self.layers * sum(i * o for i, o in self.matrices)
        return inner + sum(i * o for i, o in self.embedding_projections)

    @property
    def embedding_projections(self) -> tuple[tuple[int, int], ...]:
        """Return (inputs, outputs) of the projections from and to a narrower embedding, if any."""
        narrow, wide = self.embedding, self.hidden
        return () if narrow == wide else ((narrow, wide), (wide, narrow))

    def adapter_weights(self, rank: int) -> int:
        """Return the number of weights of LoRA adapters on all linear layers except the head."""
        sides = self.layers * sum(i + o for i, o in self.matrices)
        return rank * (sides + sum(i + o for i, o in self.embedding_projections))

    @property
    def kv_elements_per_token(self) -> int:
        """Return the number of KV cache elements per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


class UnknownModelError(Exception):
    """The error for a model of unknown shape; the message names its configuration key."""


def shape_of(model: ModelConfig, *, key: str = "model") -> ModelShape | None:
    """Return the shape of ``model``, the value of config key ``key``; None if it is unknown."""
    fields = config_fields(model, key=key)
    if not isinstance(fields.get("model_type"), str):
        return None
    fields.setdefault("vocab_size", model.vocab_size)
    family = FAMILIES.get(fields["model_type"])
    try:
        shape = None if family is None else family(fields)
        sizes = (shape.weights, shape.hidden, shape.heads, shape.vocab) if shape else ()
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # a field is missing or wrong
        return None
    return shape if all(type(size) is int and 0 < size < 2**60 for size in sizes) else None


def _plain_shape(
    c: Mapping[str, Any], *, layers: int, hidden: int, heads: int, ffn: int, **changes: Any
) -> ModelShape:
    """Return the shape of a decoder with one QKV matrix, biases everywhere and LayerNorm.

    ``changes`` are the fields of the result that differ from the fields of such a decoder.
    """
    plain = {
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "is_gated": False,
        "wide_copies": 2,
        "vocab": c["vocab_size"],
        "matrices": ((hidden, 3 * hidden), (hidden, hidden), (hidden, ffn), (ffn, hidden)),
        "layer_vectors": 9 * hidden + ffn,
        "tail": 2 * hidden,
        "embedding": hidden,
    }
    return ModelShape(layers=layers, hidden=hidden, heads=heads, ffn=ffn, **plain | changes)


def _head_weights(c: Mapping[str, Any], width: int, *, tied_by_default: bool) -> int:
    """Return the head's weights, 0 if tied; ``tied_by_default`` is the config class's default."""
    return 0 if c.get("tie_word_embeddings", tied_by_default) else c["vocab_size"] * width


def _opt_shape(c: Mapping[str, Any]) -> ModelShape:
    hidden, ffn = c["hidden_size"], c["ffn_dim"]
    embedding = c.get("word_embed_proj_dim") or hidden
    projection = 0 if embedding == hidden else embedding * hidden
    has_norm = c.get("do_layer_norm_before", True) and not c.get("_remove_final_layer_norm", False)
    tail = projection + 2 * hidden * has_norm
    positions = c.get("max_position_embeddings", 2048) + 2
    return _plain_shape(
        c,
        layers=c["num_hidden_layers"],
        hidden=hidden,
        heads=c["num_attention_heads"],
        ffn=ffn,
        wide_copies=1 if c.get("activation_function", "relu") == "relu" else 2,
        matrices=((hidden, hidden),) * 4 + ((hidden, ffn), (ffn, hidden)),
        outside=c["vocab_size"] * embedding + positions * hidden + projection + tail,
        tail=tail,
        head=_head_weights(c, embedding, tied_by_default=True),
        embedding=embedding,
    )


def _llama_shape(
    fields: Mapping[str, Any], *, biases: int = 0, qk_norm: bool = False, **defaults: Any
) -> ModelShape:
    """Return the shape of Llama or Mistral, or of Qwen2 (``biases``) or Qwen3 (``qk_norm``).

    ``defaults`` are fields of the family's config class, for a config.json without them.
    """
    c = defaults | dict(fields)
    hidden, ffn, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, kv_heads * head_dim
    vectors = 2 * hidden + biases * (queries + 2 * keys) + 2 * head_dim * qk_norm
    if c.get("attention_bias"):
        vectors += queries + 2 * keys + hidden
    attention = ((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden))
    return _plain_shape(
        c,
        layers=c["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        is_gated=True,
        wide_copies=4,
        matrices=(*attention, (hidden, ffn), (hidden, ffn), (ffn, hidden)),
        layer_vectors=vectors,
        outside=c["vocab_size"] * hidden + hidden,
        tail=hidden,
        head=_head_weights(c, hidden, tied_by_default=False),
        has_rms_norms=True,
        norms_heads=qk_norm,
    )


def _gpt_neox_shape(c: Mapping[str, Any]) -> ModelShape:
    hidden = c["hidden_size"]
    return _plain_shape(
        c,
        layers=c["num_hidden_layers"],
        hidden=hidden,
        heads=c["num_attention_heads"],
        ffn=c["intermediate_size"],
        outside=c["vocab_size"] * hidden + 2 * hidden,
        head=_head_weights(c, hidden, tied_by_default=False),
    )


def _bloom_shape(c: Mapping[str, Any]) -> ModelShape:
    hidden = c.get("n_embed") or c["hidden_size"]
    return _plain_shape(
        c,
        layers=c.get("n_layer") or c["num_hidden_layers"],
        hidden=hidden,
        heads=c.get("n_head") or c["num_attention_heads"],
        ffn=4 * hidden,
        outside=c["vocab_size"] * hidden + 4 * hidden,
        head=_head_weights(c, hidden, tied_by_default=True),
        keeps_scores=True,
    )


def _gpt2_shape(c: Mapping[str, Any]) -> ModelShape:
    hidden = c["n_embd"]
    return _plain_shape(
        c,
        layers=c["n_layer"],
        hidden=hidden,
        heads=c["n_head"],
        ffn=c.get("n_inner") or 4 * hidden,
        outside=(c["vocab_size"] + c.get("n_positions", 1024)) * hidden + 2 * hidden,
        head=_head_weights(c, hidden, tied_by_default=True),
        # gelu_new consists of several products and a tanh, and autograd saves all their inputs.
        wide_copies=5 if c.get("activation_function", "gelu_new") in STEPWISE else 2,
    )


def _olmo2_shape(c: Mapping[str, Any]) -> ModelShape:
    """Return OLMo 2's shape: Llama with a norm over all query heads and one over all key heads."""
    shape = _llama_shape(c)
    norm_weights = (shape.heads + shape.kv_heads) * shape.head_dim
    return replace(shape, layer_vectors=shape.layer_vectors + norm_weights, norms_heads=True)


def _gemma3_shape(c: Mapping[str, Any]) -> ModelShape:
    """Return Gemma 3's shape: Llama with four norms per layer and, by default, tied embeddings."""
    defaults = {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256}
    shape = _llama_shape(c, qk_norm=True, **defaults)
    return replace(shape, layer_vectors=shape.layer_vectors + 2 * shape.hidden, norms=4)


STEPWISE = ("gelu_new", "gelu_fast")  # transformers computes these with several operations

# model_type of the HF config -> function that computes the shape from the config's fields
FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelShape]] = {
    "opt": _opt_shape,
    "llama": _llama_shape,
    "mistral": partial(_llama_shape, num_key_value_heads=8),
    "qwen2": partial(_llama_shape, biases=1, num_key_value_heads=32),
    "qwen3": partial(_llama_shape, qk_norm=True, num_key_value_heads=32, head_dim=128),
    "olmo2": _olmo2_shape,
    "gemma3_text": _gemma3_shape,
    "gpt_neox": _gpt_neox_shape,
    "bloom": _bloom_shape,
    "gpt2": _gpt2_shape,
}
