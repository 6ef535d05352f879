"""The layers of a known model family as functions: projections, norms and rotary tables.

Shapes: T = tokens, H = hidden size, O = outputs, I = inputs of a linear layer, D = head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf.base.decoder_modules import BlockModules, DecoderModules, LowRank
from rlhf.kernels.cpu.decode import Linear, Norm
from rlhf.kernels.fp32_logits import fp32_logits
from rlhf.kernels.kernel_checks import use_if_equal
from rlhf.rollout.decoders.projections import (
    ACTIVATIONS,
    AdaptedProjection,
    Projection,
    build_fastest_projection,
    can_pack_weights,
)

ROWS_TO_COMPARE = 16  # rows of numbers on which a joint projection is compared with separate ones

AdapterOf = Callable[[nn.Module], LowRank | None]  # returns a layer's LoRA adapter
TensorFunction = Callable[[Tensor], Tensor]
Embed = Callable[[Tensor, Tensor], Tensor]  # maps ids and positions (T,) to embeddings (T, H)


class Layer(NamedTuple):
    """The functions of one transformer block."""

    attention_norm: TensorFunction
    mlp_norm: TensorFunction
    query_key_value: list[Projection]
    joint_order: tuple[int, ...]  # order of queries (0), keys (1), values (2) in one projection
    query_norm: TensorFunction | None
    key_norm: TensorFunction | None
    output: Projection
    widen: TensorFunction  # computes the MLP's hidden state
    down: Projection


class RotaryEmbedding(NamedTuple):
    """Rotary embedding tables (tokens, D), or some of their rows."""

    cos: Tensor
    sin: Tensor  # with its first half negated

    def select_rows(self, places: Any) -> RotaryEmbedding:
        """Return the rows of both tables at ``places``."""
        return RotaryEmbedding(self.cos[places], self.sin[places])

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate ``x`` (..., heads, D): x * cos + (x with its halves swapped) * sin."""
        size = self.cos.shape[-1]
        rotated = x[..., :size]
        rotated = torch.addcmul(rotated * self.cos, rotated.roll(size // 2, dims=-1), self.sin)
        return rotated if size == x.shape[-1] else torch.cat([rotated, x[..., size:]], dim=-1)


class LayerBuilder:
    """A builder of a decoder's functions, all in one precision.

    On a CPU adapters are merged; if oneDNN packs (copies) the weights, queries, keys and values
    become one projection. On a GPU the model's own weights are used: linear layers become one
    projection only if their weights are adjacent in memory, in any order, and have no adapters.
    On a GPU ``casts`` has a pair (copy, weight) for each weight in another precision.
    """

    def __init__(self, parts: DecoderModules, adapter_of: AdapterOf, dtype: torch.dtype) -> None:
        parts.require_matching_weights()  # fused and compiled decoders are both built here
        self._parts = parts
        self._adapter_of = adapter_of
        self._dtype = dtype
        self._activation = parts.activation
        self.casts: list[tuple[Tensor, Tensor]] = []
        keeps_fp32 = getattr(parts.head, "keeps_fp32", False)
        self.logits_dtype = torch.float32 if keeps_fp32 else dtype
        device = parts.tokens.weight.device
        self._packs = can_pack_weights(device, dtype)
        self._merges = device.type == "cpu"

    def build_layer(self, block: BlockModules) -> Layer:
        """Build the functions of one block."""
        modules = block.query_key_value
        order = tuple(range(len(modules))) if self._packs else self._single_matmul_order(modules)
        joint = self._build_joint_projection([modules[index] for index in order])
        return Layer(
            attention_norm=self.build_norm(block.attention_norm),
            mlp_norm=self.build_norm(block.mlp_norm),
            query_key_value=[joint] if joint else [self.build_projection(m) for m in modules],
            joint_order=order,
            query_norm=None if block.query_norm is None else self.build_norm(block.query_norm),
            key_norm=None if block.key_norm is None else self.build_norm(block.key_norm),
            output=self.build_projection(block.output),
            widen=self._build_mlp_hidden(block),
            down=self.build_projection(block.down),
        )

    def _build_mlp_hidden(self, block: BlockModules) -> TensorFunction:
        if block.gate is None:
            return self.build_projection(block.up, activation=self._activation)
        pair = (block.gate, block.up)
        is_joint = not self._packs and self._single_matmul_order(pair) == (0, 1)
        both = self._build_joint_projection(pair if is_joint else ())
        if both is not None:
            activate = ACTIVATIONS[self._activation]

            def compute_hidden(x: Tensor) -> Tensor:
                gate, up = both(x).chunk(2, dim=-1)
                return activate.function(gate).mul_(up)

            return compute_hidden
        gate = self.build_projection(block.gate, activation=self._activation)
        up = self.build_projection(block.up)
        return lambda x: up.project_and_multiply(x, gate(x))

    def _build_joint_projection(self, modules: Sequence[Any]) -> Projection | None:
        """Build one projection from several layers; None if torch must compute separate ones."""
        if len(modules) <= 1:
            return self.build_projection(*modules) if modules else None

        def load() -> Any:
            return self.build_projection(*modules)

        def compare(joint: Projection) -> list[tuple[Tensor, Tensor]]:
            width, device = modules[0].weight.shape[1], modules[0].weight.device
            x = torch.randn(ROWS_TO_COMPARE, width, device=device).to(self._dtype)
            separate = (
                functional.linear(
                    x,
                    self._merged_weight(each).to(self._dtype),
                    None if each.bias is None else each.bias.to(self._dtype),
                )
                for each in modules
            )
            return [(joint(x), torch.cat([*separate], dim=-1))]

        device = modules[0].weight.device.type
        projection: Projection | None = use_if_equal("joint projections", device, load, compare)
        return projection

    def _single_matmul_order(self, modules: Sequence[Any]) -> tuple[int, ...]:
        """Return the order in which one GPU matmul can compute ``modules``; () if none can."""
        if len(modules) > 1 and (self._merges or any(map(self._adapter_of, modules))):
            return ()
        given_order = range(len(modules))
        by_address = sorted(given_order, key=lambda index: modules[index].weight.data_ptr())
        for order in (given_order, by_address):
            weights = [modules[index].weight for index in order]
            biases = [modules[index].bias for index in order if modules[index].bias is not None]
            if self._can_join_weights(weights) and self._can_join_weights(biases):
                return tuple(order)
        return ()

    def _can_join_weights(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if ``tensors`` follow one another in memory, or a cast copies them anyway."""
        if any(tensor.dtype is not self._dtype for tensor in tensors):
            return True
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
        follow = all(end == after.data_ptr() for end, after in zip(ends, tensors[1:], strict=False))
        return follow and len(storages) <= 1

    def build_embedding(self) -> Embed:
        """Build the function that returns embeddings (T, H) of tokens at their positions.

        Token embeddings narrower than H are projected; position embeddings, if any, are added.
        """
        parts, dtype, module = self._parts, self._dtype, self._parts.project_in
        project_in = None if module is None else self.build_projection(module)

        def embed(ids_T: Tensor, positions_T: Tensor) -> Tensor:
            x_TH: Tensor = functional.embedding(ids_T, parts.tokens.weight).to(dtype)
            if project_in is not None:
                x_TH = project_in(x_TH)
            if parts.positions is not None:
                places_T = positions_T + parts.position_offset
                x_TH = x_TH + functional.embedding(places_T, parts.positions.weight).to(dtype)
            return x_TH

        return embed

    def build_projection(self, *modules: Any, activation: str | None = None) -> Projection:
        """Build one projection from linear layers that have the same input."""
        linear = self.join_linear_layers(*modules)
        adapter = None if self._merges else self._adapter_of(modules[0])
        if adapter is None:
            return build_fastest_projection(*linear, activation)
        a_RI, b_OR = self._join_and_cast(adapter.a_RI), self._join_and_cast(adapter.b_OR)
        return AdaptedProjection(*linear, activation, LowRank(a_RI, b_OR, adapter.scaling))

    def build_output_layer(self) -> TensorFunction:
        """Build the function that returns logits (T, V), in fp32 if the output layer keeps it."""
        head = self._parts.head
        if self.logits_dtype is self._dtype:
            return self.build_projection(head)
        linear = self.join_linear_layers(head)
        return lambda x: fp32_logits(x, *linear)

    def join_linear_layers(self, *modules: Any) -> Linear:
        """Join linear layers that have the same input into one; on a CPU, merge their adapters."""
        biases = [module.bias for module in modules if module.bias is not None]
        weight = self._join_and_cast(*(self._merged_weight(module) for module in modules))
        return Linear(weight, self._join_and_cast(*biases) if biases else None)

    def _join_and_cast(self, *weights: Tensor) -> Tensor:
        """Join ``weights`` into one tensor in the decoder's precision; copy only if necessary."""
        is_exact = all(weight.dtype is self._dtype for weight in weights)
        if len(weights) == 1 and is_exact:
            return weights[0]
        if is_exact and not self._merges:
            first, rows = weights[0].detach(), sum(len(weight) for weight in weights)
            return first.as_strided((rows, *first.shape[1:]), first.stride())
        casts = [weight.to(self._dtype) for weight in weights]
        cast = casts[0] if len(casts) == 1 else torch.cat(casts)
        if not self._merges:  # on a GPU the copies are updated when the weights change
            parts = torch.split(cast, [len(weight) for weight in weights])
            self.casts += zip(parts, weights, strict=True)
        return cast

    def _merged_weight(self, module: Any) -> Tensor:
        """Return the layer's own weight, not a copy, unless an adapter is merged into it."""
        weight_OI: Tensor = module.weight
        adapter = self._adapter_of(module) if self._merges else None
        return weight_OI if adapter is None else adapter.merged_with(weight_OI)

    def build_norm(self, module: Any) -> TensorFunction:
        """Build the function of a LayerNorm or RMSNorm module."""
        weight, bias, epsilon, is_rms, size = self.norm_parameters(module)
        if is_rms:
            return lambda x: functional.rms_norm(x, (size,), weight, epsilon)
        return lambda x: functional.layer_norm(x, (size,), weight, bias, epsilon)

    def norm_parameters(self, module: Any) -> Norm:
        """Return the weights and options of a norm."""
        weight, bias = (
            None if vector is None else self._join_and_cast(vector)
            for vector in (module.weight, getattr(module, "bias", None))
        )
        if isinstance(module, nn.LayerNorm):
            return Norm(weight, bias, module.eps, False, module.normalized_shape[0])
        return Norm(weight, None, module.variance_epsilon, True, len(module.weight))

    def build_norm_or_projection(self, module: Any) -> TensorFunction:
        """Build the function of a norm or linear layer that precedes the output layer."""
        is_projection = hasattr(module, "in_features")
        return self.build_projection(module) if is_projection else self.build_norm(module)

    def build_rotary_embedding(self, tokens: int) -> RotaryEmbedding | None:
        """Build the rotary tables for positions below ``tokens``; None if the model has none."""
        rotary, device = self._parts.rotary, self._parts.tokens.weight.device
        if rotary is None:
            return None
        like = torch.empty(0, dtype=torch.float32, device=device)
        cos, sin = rotary(like, torch.arange(tokens, device=device)[None])
        sin = sin[0].clone()
        sin[:, : sin.shape[1] // 2].neg_()
        return RotaryEmbedding(cos[0].to(self._dtype), sin.to(self._dtype))
