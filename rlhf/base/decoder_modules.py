"""Describe a decoder's modules for fused decoding; find end tokens and the KV cache parameter."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.base.errors import CapabilityError

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

    def require_matching_weights(self) -> None:
        """Check the weights' shapes against the sizes that kernels use to index their buffers.

        Compiled code checks no bounds: a weight of another shape would make it write past a buffer.

        Raises:
            CapabilityError: if the weights do not match.
        """
        hidden, inner = len(self.blocks[0].output.weight), len(self.blocks[0].up.weight)
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        needed = {"output": [hidden, query], "down": [hidden, inner], "up": [inner, hidden]}
        needed |= {"gate": [inner, hidden], "attention_norm": [hidden], "mlp_norm": [hidden]}
        needed |= {"query_norm": [self.head_dim], "key_norm": [self.head_dim]}
        pairs = [(getattr(block, n), shape) for block in self.blocks for n, shape in needed.items()]
        for block in self.blocks:
            rows = [query, key, key] if len(block.query_key_value) > 1 else [query + 2 * key]
            pairs += zip(block.query_key_value, ([size, hidden] for size in rows), strict=True)
        vocabulary, embedded = self.tokens.weight.shape
        pairs.append((self.project_in, [hidden, embedded]))
        pairs.append((self.tokens, [vocabulary, hidden if self.project_in is None else embedded]))
        width = hidden
        for module in self.final:
            after = len(module.weight) if hasattr(module, "in_features") else None
            pairs.append((module, [width] if after is None else [after, width]))
            width = after or width
        pairs.append((self.head, [len(self.head.weight), width]))
        odd = [(m, shape) for m, shape in pairs if m is not None and not _has_shape(m, shape)]
        if odd or not key or self.num_heads % self.num_kv_heads:
            fault = f"{self.num_heads} query heads cannot share {self.num_kv_heads} key heads"
            for module, shape in odd[:1]:
                fault = f"{module} must have a weight of shape {shape}, and a bias that fits it"
            raise CapabilityError(
                f"rollout.backend=fast: {fault}; use the config.json that was saved with these "
                "weights, or rollout=hf"
            )


def _has_shape(module: Any, shape: list[int]) -> bool:
    """Return True if the weight of ``module`` has ``shape``, no size is 0, and its bias fits."""
    weight, bias = module.weight, getattr(module, "bias", None)
    actual = module.normalized_shape if weight is None else weight.shape
    return list(actual) == shape and all(shape) and (bias is None or len(bias) == shape[0])


def end_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the ids of the tokens that end a response, from the model's generation config."""
    ids = model.generation_config.eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


CACHE_NAMES = ("cache", "past_key_values")  # the name since transformers 5.24, and the older name


def kv_cache_parameter_name(parameters: Container[str]) -> str | None:
    """Return the one of a forward method's ``parameters`` that takes the KV cache, or None."""
    return next((name for name in CACHE_NAMES if name in parameters), None)
