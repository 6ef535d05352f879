"""Estimate the seconds of passes over models, communication, optimizer steps and decoding.

FLOPs are counted as in Narayanan et al. (https://arxiv.org/abs/2104.04473, appendix): a weight
takes 2 FLOPs per token in the forward pass and 4 in the backward pass. ``Efficiency`` holds the
shares of the peak rates that a machine reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from rlhf.config.machine_rates import HOST_MEMORY_BANDWIDTH
from rlhf.config.roles import SHARDED_WEIGHTS
from rlhf.models.model_uses import Costs, ModelUse, backward_to_forward_ratio, forward_flops
from rlhf.plan.memory_model import MemorySetting, kv_cache_bytes, layer_activation_bytes

ADAM_BYTES = 28  # bytes read and written per weight: gradient, master, two moments and weight
NVME_BYTES = 24  # bytes read and written per weight: master and moments
INT8_SHARE = 0.5  # bytes of int8 weights relative to half precision


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The shares of peak rates that a machine reaches, and overheads per layer and message."""

    training: float
    """Share of the peak FLOPs per second in training passes of many tokens."""
    scoring: float
    """Share of the peak FLOPs per second in passes without gradients."""
    sharded: float
    """Rate of passes of a sharded model, which wait for weights, relative to unsharded passes."""
    bandwidth: float
    attention: float
    """Share of the peak bandwidth in reading the KV cache."""
    link: float
    layer_seconds: float
    """Seconds of launches and waiting per layer and decode step."""
    message_seconds: float
    """Latency in seconds of one message between ranks."""
    filling: float = 0.0
    """A pass of ``filling`` tokens per FLOP/byte of the machine reaches half of these shares."""
    step_seconds: float = 0.0
    """Seconds per decode step outside the layers: sampling, and the work of the host."""
    sharded_layer_seconds: float = 0.0
    """Seconds of collectives per layer of a forward pass over a sharded model, if these do not
    overlap with the computation."""
    touches: float = 0.0
    """Times that a forward pass reads or writes each byte of activations; 0: hidden by matmuls."""
    layer_calls: float = 0.0
    """Calls of torch operations in one layer of a forward pass."""
    decode_calls: float = 0.0
    """Calls of torch operations in one layer of a decode step, if they delay the device."""
    hooked_layer_seconds: float = 0.0
    """Seconds of DeepSpeed's hooks in one layer of a forward pass over a sharded model."""


@dataclass(frozen=True, kw_only=True)
class CostModel(MemorySetting):
    """A machine and ZeRO setting, with the efficiency and methods for which times are estimated."""

    efficiency: Efficiency
    methods: tuple[Costs, ...] = ()
    """Costs that the run's methods add."""

    def is_gathered(self, model: ModelUse) -> bool:
        """Return True if the ranks gather the weights of ``model`` from each other."""
        return self.machine.ranks > 1 and self.is_sharded(model)

    def flops_per_second(self, model: ModelUse, *, trains: bool) -> float:
        """Return the FLOPs per second of a rank in passes of many tokens; lower if sharded."""
        shares = self.efficiency
        share = shares.training if trains else shares.scoring
        return self.machine.operations * share * (shares.sharded if self.is_gathered(model) else 1)

    def with_whole_weights(self) -> Self:
        """Return the costs of a process on one of these devices that holds a whole model.

        The stage is the run's, or the highest stage with whole weights if that is lower. Stage 0
        would be wrong, since the precision of the weights depends on the stage.
        """
        stage = min(self.zero.stage, SHARDED_WEIGHTS - 1)
        zero = replace(self.zero, stage=stage, offload_parameters=False)
        return replace(self, machine=replace(self.machine, ranks=1, nodes=1), zero=zero)

    @property
    def bandwidth(self) -> float:
        """Return the bytes per second that one rank reads from its memory."""
        return self.machine.bandwidth * self.efficiency.bandwidth


def forward_bytes(
    model: ModelUse, *, sequences: float, tokens: float, positions: float, size: int, products: bool
) -> float:
    """Return the bytes of activations, scores and logits of a forward pass.

    If ``products``, attention uses matrix products, which write their scores to memory.
    """
    shape = model.shape
    layer = layer_activation_bytes(shape, tokens, size=size, uses_matmul_attention=products)
    scores = 2.0 * shape.heads * tokens * tokens * size if products else 0.0
    logits = 0.0 if model.is_scorer else positions * shape.vocab * size
    return sequences * (shape.layers * (layer + scores) + logits)


class ForwardWork(NamedTuple):
    """The work of a model's forward passes in one step, on one rank."""

    operations: float
    """FLOPs."""
    bytes: float
    """Bytes of activations."""
    passes: int
    """Number of micro-batches."""
    tokens: float = 0.0
    """Tokens of this rank with padding."""


def computing_seconds(
    costs: CostModel, model: ModelUse, work: ForwardWork, *, trains: bool
) -> float:
    """Return the seconds of the forward passes, without waiting for gathered weights.

    A pass of t tokens reaches t / (t + half) of the rate of a long pass. On a GPU, kernel launches
    overlap with computing; on a CPU, call overhead adds to the time.
    """
    efficiency, machine = costs.efficiency, costs.machine
    half = efficiency.filling * machine.operations / machine.bandwidth
    unfilled = half * work.passes / work.tokens if work.tokens else 0.0
    layers = work.passes * model.shape.layers
    calls = layers * efficiency.layer_calls * machine.call_seconds
    if costs.is_sharded(model):
        calls += layers * efficiency.hooked_layer_seconds
    computing = work.operations * (1 + unfilled) / costs.flops_per_second(model, trains=trains)
    computing += efficiency.touches * work.bytes / costs.bandwidth
    together = max(computing, calls) if machine.is_gpu else computing + calls
    waiting = layers * efficiency.sharded_layer_seconds if costs.is_gathered(model) else 0.0
    return together + waiting


def gather_weights_seconds(
    costs: CostModel, model: ModelUse, *, within_node: bool = False
) -> float:
    """Return the seconds to all-gather or load the full weights once; 0 if they are not sharded.

    If ``within_node``, the ranks of each node together hold all weights (ZeRO++ hpZ).
    """
    machine, zero = costs.machine, costs.zero
    if not costs.is_sharded(model):
        return 0.0
    size = model.weights * costs.bytes_per_weight(model)
    is_int8 = zero.quantize_weights or (zero.quantize_frozen_weights and model.extra_weights)
    moved = size * (INT8_SHARE if is_int8 else 1)
    seconds = 0.0
    if machine.ranks > 1:
        seconds = _all_gather_seconds(costs, moved, within_node=within_node)
    if costs.offloads_weights(model):
        if zero.nvme_path is not None and not model.role.is_frozen:
            return seconds + size / machine.nodes / machine.nvme_of_node
        seconds += size / machine.ranks / machine.host_link
    return seconds


def _all_gather_seconds(costs: CostModel, moved: float, *, within_node: bool = False) -> float:
    """Return the seconds of an all-gather of ``moved`` bytes; a reduce-scatter takes as long."""
    machine = costs.machine
    per_node = machine.ranks_per_node
    inside = moved * (per_node - 1) / per_node / machine.link
    outside = moved * (machine.nodes - 1) / machine.nodes / machine.network_of_node
    latency = costs.efficiency.message_seconds * math.log2(machine.ranks)
    return max(inside, 0.0 if within_node else outside) / costs.efficiency.link + latency


def no_grad_pass_seconds(costs: CostModel, model: ModelUse, work: ForwardWork) -> float:
    """Return the seconds of passes without gradients, which overlap with gathering weights."""
    gathering = work.passes * gather_weights_seconds(costs, model)
    return max(computing_seconds(costs, model, work, trains=False), gathering)


def training_seconds(costs: CostModel, model: ModelUse, work: ForwardWork) -> float:
    """Return the seconds of a step: the forward passes ``work``, backward passes and optimizer."""
    zero = costs.zero
    compute = computing_seconds(costs, model, work, trains=True)
    compute *= 1 + backward_to_forward_ratio(model)
    forward = gather_weights_seconds(costs, model)
    backward = gather_weights_seconds(costs, model, within_node=zero.hpz_partition_size > 1)
    # Stages 2 and 3 reduce gradients after every micro-batch, other stages once per step.
    reduces = work.passes if costs.stage(model) > 1 else 1
    moved = work.passes * (forward + backward) + reduces * _gradient_reduce_seconds(costs, model)
    together = max(compute, moved) if zero.overlap_comm else compute + moved
    return together + optimizer_seconds(costs, model)


def _gradient_reduce_seconds(costs: CostModel, model: ModelUse) -> float:
    machine, zero = costs.machine, costs.zero
    if machine.ranks == 1:
        return 0.0
    is_int4 = zero.quantize_gradients and machine.nodes > 1  # on one node nothing is quantized
    moved = model.trained * costs.bytes_per_weight(model) * (INT8_SHARE / 2 if is_int4 else 1)
    rounds = 2 if costs.stage(model) < 2 else 1  # noqa: PLR2004  stages 0, 1: all-reduce
    return rounds * _all_gather_seconds(costs, moved)


def optimizer_seconds(costs: CostModel, model: ModelUse) -> float:
    """Return the seconds of AdamW on a rank's share of weights, and of gathering new weights."""
    machine, zero = costs.machine, costs.zero
    stage = costs.stage(model)
    share = model.trained / (machine.ranks if stage else 1)
    gather_back = 0.0
    if stage in (1, 2) and machine.ranks > 1:
        gather_back = _all_gather_seconds(costs, model.trained * costs.bytes_per_weight(model))
    # On a CPU the states are in the host's memory in any case.
    if not zero.offload_optimizer or not stage or not machine.is_gpu:
        return share * ADAM_BYTES / costs.bandwidth + gather_back
    of_node = share * machine.ranks_per_node
    seconds = of_node * ADAM_BYTES / HOST_MEMORY_BANDWIDTH
    seconds += 2 * share * costs.bytes_per_weight(model) / machine.host_link
    if zero.nvme_path is not None:
        seconds += of_node * NVME_BYTES / machine.nvme_of_node
    return seconds + gather_back


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The responses that one rank samples in a rollout; lengths are in tokens."""

    responses: int
    rows: int
    """Responses decoded at once."""
    prompt_tokens: float
    response_tokens: float
    tensor_parallel: int
    gathers: bool
    """True: gather sharded weights once per rollout; False: layer by layer, at every token."""
    layer_factor: float = 1.0
    """Overhead per layer relative to the fast rollout."""
    shared: int = 1
    """Responses to the same prompt, which share its prefill."""


def sampling_seconds(costs: CostModel, actor: ModelUse, sampling: Sampling) -> float:
    """Return the seconds of a rollout: compute-bound prefill, then decoding one token at a time."""
    machine, efficiency, tp = costs.machine, costs.efficiency, sampling.tensor_parallel
    shape, size = actor.shape, costs.bytes_per_weight(actor)
    waves = math.ceil(sampling.responses / sampling.rows)
    tokens = sampling.prompt_tokens + sampling.response_tokens
    prompts = sampling.responses / sampling.shared
    prefill = forward_flops(actor, sequences=prompts, tokens=sampling.prompt_tokens, positions=1)
    step = forward_flops(actor, sequences=sampling.rows, tokens=1, positions=1)
    seen = round(sampling.prompt_tokens + tokens) // 2
    cached = kv_cache_bytes(shape, rows=sampling.rows, tokens=seen, size=size)
    rate = machine.operations * efficiency.scoring
    decode = max(actor.weights * size / tp / costs.bandwidth, step / rate) + efficiency.step_seconds
    decode += cached / (machine.bandwidth * efficiency.attention)
    layer = efficiency.layer_seconds + efficiency.decode_calls * machine.call_seconds
    decode += shape.layers * layer * sampling.layer_factor
    if tp > 1:  # two all-reduces over the group's ranks in every layer
        message = sampling.rows * tp * shape.hidden * size / (machine.link * efficiency.link)
        waiting = efficiency.message_seconds * math.log2(tp)
        decode += 2 * shape.layers * (waiting + message)
    times_gathered = 1 if sampling.gathers else waves * sampling.response_tokens
    gathering = times_gathered * gather_weights_seconds(costs, actor)
    return prefill / rate + waves * sampling.response_tokens * decode + gathering
