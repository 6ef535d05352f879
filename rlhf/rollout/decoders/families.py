"""Where the model families keep the parts of a decoder.

The families are those of transformers whose blocks differ in these parts alone; any other model is
run by the general decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.rollout.decoders.projections import ACTIVATIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Order(StrEnum):
    """What a block does first."""

    norm_first = "norm_first"  # x + attention(norm(x)), then x + mlp(norm(x))
    norm_last = "norm_last"  # norm(x + attention(x)), then norm(x + mlp(x))
    parallel = "parallel"  # x + attention(norm(x)) + mlp(other_norm(x))


class Block(NamedTuple):
    """The parts of one block."""

    attention_norm: Any
    mlp_norm: Any
    query_key_value: tuple[Any, ...]  # one module: queries, keys, values of each head in turn
    query_norm: Any | None
    key_norm: Any | None
    output: Any
    gate: Any | None
    up: Any
    down: Any


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a decoder, and the numbers that say how they fit together."""

    tokens: Any  # embeddings
    positions: Any | None = None  # learned embeddings of positions
    position_offset: int = 0
    project_in: Any | None = None
    rotary: Any | None = None
    blocks: list[Block]
    order: Order
    final: list[Any]  # norm and projection before the output layer
    head: Any
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str


def parts_of(model: PreTrainedModel, *, tokens: int) -> Parts | None:
    """The parts of ``model`` for sequences of up to ``tokens`` tokens; None: it is not known here.

    Not known is another family too where a window hides some of the tokens, where rotary
    frequencies change with the length, or where the activation is a rare one.
    """
    config = model.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        return None
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and window < tokens:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
        return None
    parts = family(model)
    return parts if parts.activation in ACTIVATIONS else None


def _opt(model: Any) -> Parts:
    config, decoder = model.config, model.model.decoder
    final = [decoder.final_layer_norm, decoder.project_out]
    return Parts(
        tokens=decoder.embed_tokens,
        positions=decoder.embed_positions,
        position_offset=decoder.embed_positions.offset,
        project_in=decoder.project_in,
        blocks=[_opt_block(layer) for layer in decoder.layers],
        order=Order.norm_first if config.do_layer_norm_before else Order.norm_last,
        final=[module for module in final if module is not None],
        head=model.get_output_embeddings(),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        activation=config.activation_function,
    )


def _opt_block(layer: Any) -> Block:
    attention = layer.self_attn
    return Block(
        attention_norm=layer.self_attn_layer_norm,
        mlp_norm=layer.final_layer_norm,
        query_key_value=(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=None,
        key_norm=None,
        output=attention.out_proj,
        gate=None,
        up=layer.fc1,
        down=layer.fc2,
    )


def _llama(model: Any) -> Parts:
    config, trunk = model.config, model.model
    heads = config.num_attention_heads
    return Parts(
        tokens=trunk.embed_tokens,
        rotary=trunk.rotary_emb,
        blocks=[_llama_block(layer) for layer in trunk.layers],
        order=Order.norm_first,
        final=[trunk.norm],
        head=model.get_output_embeddings(),
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        activation=config.hidden_act,
    )


def _llama_block(layer: Any) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    return Block(
        attention_norm=layer.input_layernorm,
        mlp_norm=layer.post_attention_layernorm,
        query_key_value=(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        output=attention.o_proj,
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=mlp.down_proj,
    )


def _gpt_neox(model: Any) -> Parts:
    config, trunk = model.config, model.gpt_neox
    return Parts(
        tokens=trunk.embed_in,
        rotary=trunk.rotary_emb,
        blocks=[_gpt_neox_block(layer) for layer in trunk.layers],
        order=Order.parallel if config.use_parallel_residual else Order.norm_first,
        final=[trunk.final_layer_norm],
        head=model.get_output_embeddings(),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        activation=config.hidden_act,
    )


def _gpt_neox_block(layer: Any) -> Block:
    return Block(
        attention_norm=layer.input_layernorm,
        mlp_norm=layer.post_attention_layernorm,
        query_key_value=(layer.attention.query_key_value,),
        query_norm=None,
        key_norm=None,
        output=layer.attention.dense,
        gate=None,
        up=layer.mlp.dense_h_to_4h,
        down=layer.mlp.dense_4h_to_h,
    )


FAMILIES: dict[str, Callable[[Any], Parts]] = {
    "opt": _opt,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gpt_neox": _gpt_neox,
}
