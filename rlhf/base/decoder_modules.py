"""The modules of a decoder, from which fused decoding is built; its end tokens and KV cache."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class BlockOrder(StrEnum):
    """The order of norms, attention and MLP in a transformer block."""

    norm_first = "norm_first"  # x + attention(norm(x)), then x + mlp(norm(x))
    norm_last = "norm_last"  # norm(x + attention(x)), then norm(x + mlp(x))
    parallel = "parallel"  # x + attention(norm(x)) + mlp(other_norm(x))


class LowRank(NamedTuple):
    """A LoRA adapter, with which a linear layer of weight W (O, I) gives W x + scaling * B A x."""

    a_RI: Tensor
    b_OR: Tensor
    scaling: float

    def merged_with(self, weight_OI: Tensor) -> Tensor:
        """Return W + scaling * B A, computed in fp32 and rounded to the dtype of W."""
        merged_OI = weight_OI.float().addmm(
            self.b_OR.float(), self.a_RI.float(), alpha=self.scaling
        )
        return merged_OI.to(weight_OI.dtype)


class BlockModules(NamedTuple):
    """The modules of one transformer block."""

    attention_norm: Any
    mlp_norm: Any
    query_key_value: tuple[Any, ...]  # three modules, or one whose output has q, k, v per head
    query_norm: Any | None
    key_norm: Any | None
    output: Any
    gate: Any | None
    up: Any
    down: Any


@dataclass(frozen=True, kw_only=True)
class DecoderModules:
    """The modules of a decoder, and the sizes and options needed to run them."""

    tokens: Any  # token embeddings
    positions: Any | None  # learned position embeddings
    position_offset: int
    project_in: Any | None
    rotary: Any | None
    blocks: list[BlockModules]
    order: BlockOrder
    final: list[Any]  # modules before the output layer: norm, then projection if any
    head: Any
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str


def end_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the ids of the tokens that end a response, from the model's generation config."""
    ids = model.generation_config.eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


CACHE_NAMES = ("cache", "past_key_values")  # the name since transformers 5.24, and the older name


def kv_cache_parameter_name(parameters: Container[str]) -> str | None:
    """Return the name of a forward method's parameter for the KV cache; None if it has none."""
    return next((name for name in CACHE_NAMES if name in parameters), None)
