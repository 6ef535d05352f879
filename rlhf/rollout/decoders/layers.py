"""A known family's decoder as callable functions: projections, norms and rotary tables.

Shapes: T = tokens, H = hidden size, O = outputs, I = inputs of a linear layer, D = head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf.decoder_parts import BlockParts, DecoderParts, LowRank
from rlhf.kernels.decode import Linear, Norm
from rlhf.rollout.decoders.projections import (
    AdaptedProjection,
    Projection,
    can_pack,
    projection,
)

AdapterOf = Callable[[nn.Module], LowRank | None]  # finds the adapter of a linear layer
Step = Callable[[Tensor], Tensor]


class Layer(NamedTuple):
    """The functions of one transformer block."""

    attention_norm: Step
    mlp_norm: Step
    query_key_value: list[Projection]
    query_norm: Step | None
    key_norm: Step | None
    output: Projection
    gate: Projection | None
    up: Projection
    down: Projection

    def widened(self, x: Tensor) -> Tensor:
        """Return the MLP's hidden state."""
        return self.up(x) if self.gate is None else self.up.times(x, self.gate(x))


class Rotations(NamedTuple):
    """Rotary embedding tables (tokens, D), or some of their rows."""

    cos: Tensor
    sin: Tensor  # with its first half negated

    def at(self, places: Any) -> Rotations:
        """Return the rows at ``places``."""
        return Rotations(self.cos[places], self.sin[places])

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate ``x`` (..., heads, D): x * cos + (x with its halves swapped) * sin."""
        size = self.cos.shape[-1]
        turned = x[..., :size]
        turned = torch.addcmul(turned * self.cos, turned.roll(size // 2, dims=-1), self.sin)
        return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], dim=-1)


class Embedding:
    """The token embeddings, projected if they are narrower, plus the position embeddings if any."""

    def __init__(
        self, parts: DecoderParts, project_in: Projection | None, dtype: torch.dtype
    ) -> None:
        self._parts = parts
        self._project_in = project_in
        self._dtype = dtype

    def __call__(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return the embeddings (T, H) of tokens at their positions."""
        parts = self._parts
        x_TH: Tensor = functional.embedding(ids_T, parts.tokens.weight).to(self._dtype)
        if self._project_in is not None:
            x_TH = self._project_in(x_TH)
        if parts.positions is not None:
            places_T = positions_T + parts.position_offset
            x_TH = x_TH + functional.embedding(places_T, parts.positions.weight).to(self._dtype)
        return x_TH


class LayerBuilder:
    """A builder of a decoder's functions, all in one precision.

    On a CPU, where weights are copied anyway, queries, keys and values become one projection, and
    adapters are merged. On a GPU neither is: the model's own weights are used. There ``casts`` has
    the copies of weights that are not in this precision, each with its weight.
    """

    def __init__(self, parts: DecoderParts, adapter_of: AdapterOf, dtype: torch.dtype) -> None:
        self._parts = parts
        self._adapter_of = adapter_of
        self._dtype = dtype
        self._activation = parts.activation
        self.casts: list[tuple[Tensor, Tensor]] = []
        device = parts.tokens.weight.device
        self._joins = can_pack(device, dtype)
        self._merges = device.type == "cpu"

    def layer(self, block: BlockParts) -> Layer:
        """Build the functions of one block."""
        modules = block.query_key_value
        joined = [modules] if self._joins else [(module,) for module in modules]
        activation = self._activation
        gate = None if block.gate is None else self.project(block.gate, activation=activation)
        return Layer(
            attention_norm=self.norm(block.attention_norm),
            mlp_norm=self.norm(block.mlp_norm),
            query_key_value=[self.project(*together) for together in joined],
            query_norm=None if block.query_norm is None else self.norm(block.query_norm),
            key_norm=None if block.key_norm is None else self.norm(block.key_norm),
            output=self.project(block.output),
            gate=gate,
            up=self.project(block.up, activation=None if gate else activation),
            down=self.project(block.down),
        )

    def embedding(self) -> Embedding:
        """Build the function that embeds tokens."""
        module = self._parts.project_in
        return Embedding(self._parts, None if module is None else self.project(module), self._dtype)

    def project(self, *modules: Any, activation: str | None = None) -> Projection:
        """Build one projection from linear layers that share their inputs."""
        linear = self.joined(*modules)
        adapter = None if self._merges else self._adapter_of(modules[0])
        if adapter is None:
            return projection(*linear, activation)
        a_RI, b_OR = self._cast(adapter.a_RI), self._cast(adapter.b_OR)
        return AdaptedProjection(*linear, activation, LowRank(a_RI, b_OR, adapter.scaling))

    def joined(self, *modules: Any) -> Linear:
        """Return linear layers that share their inputs as one, on a CPU with adapters merged in."""
        weights = [self._cast(self._weight(module)) for module in modules]
        biases = [self._cast(module.bias) for module in modules if module.bias is not None]
        if len(modules) == 1:  # without a copy
            return Linear(weights[0], biases[0] if biases else None)
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def _cast(self, weight: Tensor) -> Tensor:
        """Return ``weight`` in this precision, without a copy if it is."""
        cast = weight.to(self._dtype)
        if cast is not weight and not self._merges:  # a CPU packs its casts, and frees them
            self.casts.append((cast, weight))
        return cast

    def _weight(self, module: Any) -> Tensor:
        """Return the layer's own weight, not a copy, unless an adapter is merged into it."""
        weight_OI: Tensor = module.weight
        adapter = self._adapter_of(module) if self._merges else None
        return weight_OI if adapter is None else adapter.merged_into(weight_OI)

    def norm(self, module: Any) -> Step:
        """Build a LayerNorm, or the RMS norm that the transformers families share."""
        weight, bias, epsilon, is_rms, size = self.norm_parts(module)
        if is_rms:
            return lambda x: functional.rms_norm(x, (size,), weight, epsilon)
        return lambda x: functional.layer_norm(x, (size,), weight, bias, epsilon)

    def norm_parts(self, module: Any) -> Norm:
        """Return the weights and options of a norm."""
        weight, bias = (
            None if vector is None else self._cast(vector)
            for vector in (module.weight, getattr(module, "bias", None))
        )
        if isinstance(module, nn.LayerNorm):
            return Norm(weight, bias, module.eps, False, module.normalized_shape[0])
        return Norm(weight, None, module.variance_epsilon, True, len(module.weight))

    def norm_or_projection(self, module: Any) -> Step:
        """Build the function of a norm or linear layer that precedes the output layer."""
        return self.project(module) if hasattr(module, "in_features") else self.norm(module)

    def rotations(self, tokens: int) -> Rotations | None:
        """Build the rotary embedding's tables for positions below ``tokens``, if there is one."""
        rotary, device = self._parts.rotary, self._parts.tokens.weight.device
        if rotary is None:
            return None
        like = torch.empty(0, dtype=torch.float32, device=device)
        cos, sin = rotary(like, torch.arange(tokens, device=device)[None])
        sin = sin[0].clone()
        sin[:, : sin.shape[1] // 2].neg_()
        return Rotations(cos[0].to(self._dtype), sin.to(self._dtype))
