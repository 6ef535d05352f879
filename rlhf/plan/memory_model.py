"""Compute the bytes of one rank: model states, activations, logits, buffers and KV cache.

Model states follow ZeRO (https://arxiv.org/abs/1910.02054, section 5) as DeepSpeed 0.19.8 keeps
them. Activations follow Korthikanti et al. (https://arxiv.org/abs/2205.05198, section 4), without
dropout.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from rlhf.config.choices import Dtype, MomentsDtype
from rlhf.config.machine_rates import Machine
from rlhf.config.roles import SHARDED_WEIGHTS, Role, has_16_bit_weights, runs_on_torch, stage_of
from rlhf.models.model_uses import ModelUse
from rlhf.models.shapes import ModelShape
from rlhf.options import ZeroConfig

HALF, SINGLE = 2, 4  # bytes per element
CPU_BLOCK = (1024, 2048)  # tokens and vocabulary entries whose logits exist at the same time
GPU_BLOCK = (1024, None)  # None: all vocabulary entries (rlhf/models/output_layer.py)
TORCH_TOKENS = 256  # without a kernel, torch copies the logits of this many tokens twice in fp32
LONGEST = 512  # most tokens per sequence for matmul attention (rlhf/kernels/cpu/cpu_layers.py)
KEPT_TOKENS = 3  # matmul attention keeps probabilities if tokens <= this times the head size
PREFILL_TOKENS = 8192  # prompt tokens per prefill pass (rlhf/rollout/scheduler.py)
BUCKET = 500_000_000  # DeepSpeed's default for reduce_bucket_size, in elements
PREFETCH = 50_000_000  # DeepSpeed's default for stage3_prefetch_bucket_size, in elements
PERSISTENCE = 100_000  # DeepSpeed's default for stage3_param_persistence_threshold, in elements
LIVE = 1_000_000_000  # DeepSpeed's default for stage3_max_live_parameters, in elements

Parts = Counter[str]  # bytes by purpose, such as weights or logits


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """The bytes by purpose of a model's states on one rank: on its device, and offloaded."""

    device: Parts
    host: Parts


def bytes_per_weight(role: Role, zero: ZeroConfig, dtype: Dtype) -> int:
    """Return the bytes per weight in the precision in which the model computes."""
    return HALF if has_16_bit_weights(role, zero, dtype) else SINGLE


def model_state_bytes(model: ModelUse, zero: ZeroConfig, machine: Machine) -> ModelStates:
    """Return the bytes on one rank of a model's weights, gradients, optimizer and fp32 copies."""
    role, stage, ranks = model.role, stage_of(model.role, zero), machine.ranks
    size = bytes_per_weight(role, zero, machine.dtype)
    device, host = Counter[str](), Counter[str]()
    shards = ranks if stage == SHARDED_WEIGHTS else 1
    weights = model.weights * size // shards
    is_frozen_int8 = zero.quantize_frozen_weights and stage == SHARDED_WEIGHTS
    if is_frozen_int8:
        frozen = model.weights - model.trained
        weights = (frozen + model.trained * size) // shards
    (host if offloads_weights(role, zero) else device)["weights"] = weights
    if stage == SHARDED_WEIGHTS:
        device["weights"] += count_persistent_weights(model, zero) * size
        if 1 < zero.hpz_partition_size < ranks:
            device["weights"] += model.weights * size // zero.hpz_partition_size
    trained = model.trained
    if not trained:
        return ModelStates(device=device, host=host)
    half = size == HALF
    if runs_on_torch(zero, ranks=ranks, dtype=machine.dtype, needs_deepspeed=model.needs_deepspeed):
        device["gradients"] = trained * size
        moment = HALF if zero.moments is MomentsDtype.bf16 else SINGLE
        device["optimizer"] = trained * (HALF * half + 2 * moment)
    else:
        share = trained // ranks if stage else trained
        states = share * (SINGLE * half + 2 * SINGLE)
        kept = share if stage > 1 else trained  # from stage 2 on, a rank keeps only its shard
        if zero.offload_optimizer and stage > 1:
            host["gradients"] = share * SINGLE
        else:
            device["gradients"] = kept * size
        (host if zero.offload_optimizer else device)["optimizer"] = states
    for name in model.fp32_copies:
        share = trained // ranks if stage else trained
        (host if getattr(zero, f"offload_{name}") else device)[name] = share * SINGLE
    return ModelStates(device=device, host=host)


def count_persistent_weights(model: ModelUse, zero: ZeroConfig) -> int:
    """Return the number of weights that ZeRO stage 3 keeps on every rank in addition to its shard.

    DeepSpeed keeps tensors of up to param_persistence_threshold elements: biases, norms, adapters.
    """
    limit = zero.param_persistence_threshold
    limit = PERSISTENCE if limit is None else limit
    shape = model.shape
    found = shape.layers * shape.layer_vectors if shape.hidden <= limit else 0
    rank = model.extra_weights / shape.adapter_weights(1)
    small = sum(side for pair in shape.matrices for side in pair if side * rank <= limit)
    return found + int(shape.layers * rank * small)


def offloads_weights(role: Role, zero: ZeroConfig) -> bool:
    """Return True if sharded weights of ``role`` are kept in the host's memory or on NVMe."""
    if stage_of(role, zero) != SHARDED_WEIGHTS:
        return False
    own = {Role.reference: zero.offload_reference, Role.reward: zero.offload_reward}
    return own.get(role, zero.offload_parameters)


def activation_bytes(
    model: ModelUse,
    *,
    sequences: int,
    tokens: int,
    size: int,
    uses_matmul_attention: bool,
) -> int:
    """Return the bytes stored for the backward pass of sequences with ``tokens`` tokens each.

    If ``uses_matmul_attention``, attention uses matrix products instead of the fused kernel.
    ``size`` is the bytes per element.
    """
    shape = model.shape
    whole: float = sequences * layer_activation_bytes(
        shape, tokens, size=size, uses_matmul_attention=uses_matmul_attention
    )
    if uses_matmul_attention:  # the causal mask, shared by all heads and sequences
        whole += tokens * tokens * size
    kept = model.layers - model.checkpointed
    inputs = sequences * model.checkpointed * shape.hidden * tokens * size
    # A checkpointed layer recomputes all its activations for its own backward pass.
    return round(kept * whole + inputs + (whole if model.checkpointed else 0))


def layer_activation_bytes(
    shape: ModelShape, tokens: float, *, size: int, uses_matmul_attention: bool
) -> float:
    """Return the bytes that autograd saves in one layer for one sequence of ``tokens`` tokens.

    - LayerNorm: input and output. RMSNorm: input in fp32, normalized input and output.
    - Attention: queries, keys, values and output. With ``uses_matmul_attention``, keys and values
      are repeated for every query head, and short sequences store probabilities. Norms on queries
      and keys store their inputs in fp32 and their normalized inputs.
    - Eager attention: probabilities in fp32, and in half precision if the model computes in it.
    - Feed-forward: ``wide_copies`` values per unit, such as input and output of the activation.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = shape.norms * shape.hidden * (2 * size + (SINGLE if shape.has_rms_norms else 0))
    attention: float = 2 * (queries + (queries if uses_matmul_attention else keys)) * size
    if uses_matmul_attention and tokens <= KEPT_TOKENS * shape.head_dim:
        attention += shape.heads * tokens * size
    if shape.norms_heads:
        attention += (queries + keys) * (SINGLE + size)
    if shape.keeps_scores:
        attention += shape.heads * tokens * (SINGLE if size == SINGLE else SINGLE + size)
    return tokens * (norms + attention + shape.wide_copies * shape.ffn * size)


def attention_score_bytes(shape: ModelShape, *, sequences: int, tokens: int, size: int) -> int:
    """Return the bytes of one (tokens, tokens) attention matrix per head and sequence.

    Attention that is not fused holds two such matrices in a forward pass (scores and probabilities)
    and three in a backward pass. Only one layer holds them at a time.
    """
    return sequences * shape.heads * tokens * tokens * size


def autocast_copy_bytes(model: ModelUse, *, size: int, dtype: Dtype) -> int:
    """Return the bytes of half-precision weight copies that autocast keeps in a training pass."""
    if dtype is Dtype.fp32 or size == HALF:
        return 0
    return HALF * (model.shape.linear_layer_weights + model.extra_weights)


def logit_bytes(model: ModelUse, *, positions: int, size: int, is_gpu: bool) -> int:
    """Return the bytes of one block of logits and of torch's fp32 copies; 0 for a scorer."""
    if model.is_scorer:
        return 0
    most, entries = GPU_BLOCK if is_gpu else CPU_BLOCK
    width = min(entries or model.shape.vocab, model.shape.vocab)
    return width * (min(most, positions) * size + min(TORCH_TOKENS, positions) * 2 * SINGLE)


def no_grad_pass_bytes(
    model: ModelUse, *, sequences: int, tokens: int, size: int, is_gpu: bool
) -> int:
    """Return the most bytes in use in a pass without gradients: a feed-forward layer or logits.

    The layer holds its input and its normed input. It also holds the input and the output of its
    activation or, if it is gated, the activation's output, the other factor and their product; with
    an adapter, its product and its sum with the layer's output too. Beside the logits there are the
    last layer's output and its normed output.
    """
    shape = model.shape
    matrices = 2 + shape.is_gated + 2 * (model.extra_weights > 0)
    logits = logit_bytes(model, positions=sequences * tokens, size=size, is_gpu=is_gpu)
    outputs = sequences * tokens * 2 * shape.hidden * size
    return outputs + max(sequences * tokens * matrices * shape.ffn * size, logits)


def gradient_bucket_bytes(model: ModelUse, zero: ZeroConfig, machine: Machine) -> int:
    """Return the bytes of DeepSpeed's gradient buckets; their size is fixed by the configuration.

    Stage 3 keeps its bucket allocated. Stages 1 and 2 allocate one bucket per backward pass. With
    overlap_comm they allocate a second bucket, to fill it while the first is reduced.
    """
    stage = stage_of(model.role, zero)
    ranks, dtype = machine.ranks, machine.dtype
    is_torch = runs_on_torch(zero, ranks=ranks, dtype=dtype, needs_deepspeed=model.needs_deepspeed)
    if not model.trained or stage == 0 or is_torch:
        return 0
    pair = 2 if zero.overlap_comm and stage < SHARDED_WEIGHTS else 1
    bucket = zero.reduce_bucket_size or BUCKET
    return pair * bucket * bytes_per_weight(model.role, zero, dtype)


def gathered_weight_bytes(model: ModelUse, zero: ZeroConfig, machine: Machine) -> int:
    """Return the bytes of gathered weights, in use or prefetched, in a pass of a sharded model."""
    is_whole = machine.ranks == 1 and not offloads_weights(model.role, zero)
    if stage_of(model.role, zero) != SHARDED_WEIGHTS or is_whole:
        return 0
    live = min(zero.max_live_parameters or LIVE, model.weights)
    ahead = min(zero.prefetch_bucket_size or PREFETCH, model.weights)
    return (live + ahead) * bytes_per_weight(model.role, zero, machine.dtype)


def kv_cache_bytes(shape: ModelShape, *, rows: int, tokens: int, size: int) -> int:
    """Return the bytes of the KV cache of ``rows`` sequences of ``tokens`` tokens."""
    return rows * tokens * shape.kv_elements_per_token * size


class PassMoments(NamedTuple):
    """The bytes by purpose while a backward pass is in the head, the layers or the embedding."""

    head: Parts
    layers: Parts
    """In the last layer, while all other layers still store their activations."""
    embedding: Parts


def backward_bytes_by_moment(
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
    shape, head, hidden, layer, again = model.shape, 0, 0, 0, 0
    if is_gpu:
        # The gradients of the activation function's input and output, and of the layer's output.
        layer = tokens * (2 * shape.ffn + shape.hidden) * size
        if not model.is_scorer:
            weights = shape.vocab * shape.embedding
            head = weights * size * (model.trained - model.extra_weights >= weights)
            hidden = positions * shape.embedding * SINGLE  # the inputs' gradient in fp32
        if model.checkpointed:  # no layer is recomputed while there are logits
            saved = layer_activation_bytes(shape, tokens, size=size, uses_matmul_attention=False)
            again = round(saved)
    before = 0 if is_first else gradients
    # Autograd keeps the gradient of a tied head until it is added to the embedding's gradient.
    tied = 0 if shape.head else head
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
