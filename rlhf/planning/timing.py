"""Seconds of what ranks do: passes over models, communication, steps of optimisers, decoding.

Operations are counted as in Narayanan et al. (https://arxiv.org/abs/2104.04473, appendix): a
product with a weight is 2 per token, its backward pass 4. What a machine reaches of its peaks is
in ``Efficiency``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from rlhf.config.machine_schema import ZeroConfig
from rlhf.config.roles import SHARDED_WEIGHTS, stage_of
from rlhf.planning.machine import HOST_MEMORY_BANDWIDTH, Machine
from rlhf.planning.memory import kv_cache, layer_activations, weight_bytes
from rlhf.planning.models import ModelUse

ADAM_BYTES = 28  # read and written per weight: gradient, master, two moments, weight
NVME_BYTES = 24  # master and moments, read and written
INT8 = 0.5  # of the bytes of half precision


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that are reached, and what every layer of a decode step costs besides."""

    matmul: float
    sharded: float
    """Of the rate of a model in passes over a sharded one, which wait for its weights."""
    bandwidth: float
    attention: float
    """Of the bandwidth, in reading keys and values."""
    link: float
    layer_seconds: float
    """Launches and waiting of one layer in one decode step."""
    message_seconds: float
    """Latency of one message between ranks."""
    touches: float = 0.0
    """Times that a forward pass reads or writes each byte of activations; 0: hidden by products."""
    layer_calls: float = 0.0
    """Calls of torch operations in one layer of a forward pass, if the device waits for them."""
    decode_calls: float = 0.0
    """The same in a decode step."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all estimates of a plan share."""

    machine: Machine
    zero: ZeroConfig
    efficiency: Efficiency

    @property
    def operations(self) -> float:
        """Operations per second that one rank reaches."""
        return self.machine.operations * self.efficiency.matmul

    def rate_of(self, model: ModelUse) -> float:
        """The same in passes over a model, which wait where weights are gathered on the way."""
        is_gathered = self.machine.ranks > 1 and stage_of(model.role, self.zero) == SHARDED_WEIGHTS
        return self.operations * (self.efficiency.sharded if is_gathered else 1.0)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that one rank reads."""
        return self.machine.bandwidth * self.efficiency.bandwidth

    def size(self, model: ModelUse) -> int:
        """Bytes of one weight as the model computes with it."""
        return weight_bytes(model.role, self.zero, self.machine.dtype)


def forward_operations(
    model: ModelUse, *, sequences: float, tokens: float, positions: float
) -> float:
    """One pass over ``sequences`` of ``tokens``, with logits at ``positions`` of each."""
    shape = model.shape
    products = 2 * (shape.multiplied + model.adapters) * tokens
    attention = 2 * shape.layers * shape.heads * shape.head_dim * tokens * tokens  # causal: half
    width = 1 if model.is_scorer else shape.vocab
    return sequences * (products + attention + 2 * width * shape.embedding * positions)


def forward_bytes(
    model: ModelUse, *, sequences: float, tokens: float, positions: float, size: int, products: bool
) -> float:
    """Bytes of activations in one pass over ``sequences`` of ``tokens``, logits included.

    ``products``: attention by matrix products, which writes its scores.
    """
    shape = model.shape
    layer = layer_activations(shape, tokens, size=size, by_products=products)
    scores = 2.0 * shape.heads * tokens * tokens * size if products else 0.0
    logits = 0.0 if model.is_scorer else positions * shape.vocab * size
    return sequences * (shape.layers * (layer + scores) + logits)


class Pass(NamedTuple):
    """The forward passes of one step over a model."""

    operations: float
    bytes: float
    """Of activations."""
    passes: int
    """Micro-batches that they are divided into."""


def computing_seconds(at: Setting, model: ModelUse, work: Pass) -> float:
    """Seconds of the forward passes if no weight is waited for."""
    efficiency = at.efficiency
    calls = work.passes * model.shape.layers * efficiency.layer_calls
    return (
        work.operations / at.rate_of(model)
        + efficiency.touches * work.bytes / at.bandwidth
        + calls * at.machine.call_seconds
    )


def backward_share(model: ModelUse) -> float:
    """Operations of the backward pass over those of the forward one, recomputation included.

    Gradients of inputs cost as much as the pass itself, those of weights in the share that learns.
    """
    learning = min(1.0, model.trained / model.weights)
    return (model.layers + model.checkpointed) / model.shape.layers + learning


def whole_weights_seconds(at: Setting, model: ModelUse, *, within_node: bool = False) -> float:
    """Until every rank has seen all weights of a sharded model once."""
    machine, zero = at.machine, at.zero
    if stage_of(model.role, zero) != SHARDED_WEIGHTS:
        return 0.0
    size = model.weights * at.size(model)
    is_int8 = zero.quantize_weights or (zero.quantize_frozen_weights and model.adapters)
    moved = size * (INT8 if is_int8 else 1)
    seconds = 0.0
    if machine.ranks > 1:
        seconds = _spread_seconds(at, moved, within_node=within_node)
    offloaded = {"reference": zero.offload_reference, "reward": zero.offload_reward}
    if offloaded.get(model.role.value, zero.offload_parameters):
        if zero.nvme_path is not None and not model.role.is_frozen:
            return seconds + size / machine.nodes / machine.nvme_of_node
        seconds += size / machine.ranks / machine.host_link
    return seconds


def _spread_seconds(at: Setting, moved: float, *, within_node: bool = False) -> float:
    """An all-gather of ``moved`` bytes; a reduce-scatter of as many takes as long."""
    machine = at.machine
    per_node = machine.ranks_per_node
    inside = moved * (per_node - 1) / per_node / machine.link
    outside = moved * (machine.nodes - 1) / machine.nodes / machine.network_of_node
    latency = at.efficiency.message_seconds * math.log2(machine.ranks)
    return max(inside, 0.0 if within_node else outside) / at.efficiency.link + latency


def reading_seconds(at: Setting, model: ModelUse, work: Pass) -> float:
    """Seconds of forward passes."""
    gathering = work.passes * whole_weights_seconds(at, model)
    return max(computing_seconds(at, model, work), gathering)


def training_seconds(at: Setting, model: ModelUse, work: Pass) -> float:
    """Seconds of one step's forward passes, which are ``work``, backward passes and optimiser."""
    zero = at.zero
    if not model.trained:
        return 0.0
    compute = computing_seconds(at, model, work) * (1 + backward_share(model))
    stage = stage_of(model.role, zero)
    forward = whole_weights_seconds(at, model)
    backward = whole_weights_seconds(at, model, within_node=zero.hpz_partition_size > 1)
    reduces = work.passes if stage > 1 else 1  # from stage 2 on after every micro-batch
    moved = work.passes * (forward + backward) + reduces * _reduce_seconds(at, model)
    together = max(compute, moved) if zero.overlap_comm else compute + moved
    return together + optimizer_seconds(at, model)


def _reduce_seconds(at: Setting, model: ModelUse) -> float:
    machine, zero = at.machine, at.zero
    if machine.ranks == 1:
        return 0.0
    moved = model.trained * at.size(model) * (INT8 / 2 if zero.quantize_gradients else 1)
    both = 2 if stage_of(model.role, zero) < 2 else 1  # noqa: PLR2004  all ranks get all of it
    return both * _spread_seconds(at, moved)


def optimizer_seconds(at: Setting, model: ModelUse) -> float:
    """AdamW over a rank's share, where its states are."""
    machine, zero = at.machine, at.zero
    stage = stage_of(model.role, zero)
    share = model.trained / (machine.ranks if stage else 1)
    back = 0.0
    if stage in (1, 2) and machine.ranks > 1:
        back = _spread_seconds(at, model.trained * at.size(model))
    # On a CPU they are in the host's memory in any case.
    if not zero.offload_optimizer or not stage or not machine.is_gpu:
        return share * ADAM_BYTES / at.bandwidth + back
    of_node = share * machine.ranks_per_node
    seconds = of_node * ADAM_BYTES / HOST_MEMORY_BANDWIDTH
    seconds += 2 * share * at.size(model) / machine.host_link
    if zero.nvme_path is not None:
        seconds += of_node * NVME_BYTES / machine.nvme_of_node
    return seconds + back


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one rank's responses of a rollout are sampled."""

    responses: int
    rows: int
    """Of these at once."""
    prompt_tokens: float
    response_tokens: float
    tensor_parallel: int
    gathers: bool
    """Whether sharded weights are whole during the rollout; else layer by layer, at every token."""
    layer_factor: float = 1.0
    """Waiting in each layer, over that of the fast loop."""


def sampling_seconds(at: Setting, actor: ModelUse, how: Sampling) -> float:
    """A rollout: prompts at the rate of products, then tokens at the rate of memory."""
    machine, efficiency, tp = at.machine, at.efficiency, how.tensor_parallel
    shape, size = actor.shape, at.size(actor)
    waves = math.ceil(how.responses / how.rows)
    tokens = how.prompt_tokens + how.response_tokens
    prefill = forward_operations(
        actor, sequences=how.responses, tokens=how.prompt_tokens, positions=1
    )
    step = forward_operations(actor, sequences=how.rows, tokens=1, positions=1)
    seen = round(how.prompt_tokens + tokens) // 2
    cached = kv_cache(shape, rows=how.rows, tokens=seen, size=size)
    each = max(actor.weights * size / tp / at.bandwidth, step / at.operations)
    each += cached / (machine.bandwidth * efficiency.attention)
    layer = efficiency.layer_seconds + efficiency.decode_calls * machine.call_seconds
    each += shape.layers * layer * how.layer_factor
    if tp > 1:  # two sums over the group's ranks in every layer
        message = how.rows * tp * shape.hidden * size / (machine.link * efficiency.link)
        waiting = efficiency.message_seconds * math.log2(tp)
        each += 2 * shape.layers * (waiting + message)
    whole = whole_weights_seconds(at, actor)
    gathering = whole if how.gathers else waves * how.response_tokens * whole
    return prefill / at.operations + waves * how.response_tokens * each + gathering
