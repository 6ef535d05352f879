"""Bytes of one rank: what its models are, and what comes and goes while they work.

Model states follow ZeRO (https://arxiv.org/abs/1910.02054, section 5) as DeepSpeed 0.19.8 keeps
them, activations Korthikanti et al. (https://arxiv.org/abs/2205.05198, section 4) without dropout.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rlhf.config.choices import Dtype, Moments, TrainingEngine
from rlhf.config.feature_checks import torch_obstacle
from rlhf.config.machine_schema import ZeroConfig
from rlhf.config.roles import SHARDED_WEIGHTS, Role, has_half_weights, stage_of
from rlhf.planning.models import ModelUse
from rlhf.planning.shapes import ModelShape

HALF, SINGLE = 2, 4  # bytes of a number
CHUNK_ROWS = 512  # positions whose logits exist at one time (rlhf/algorithms/logprobs.py)
LONGEST = 512  # tokens that attention by matrix products takes (rlhf/models/attention.py)
KEPT_TOKENS = 3  # tokens per dimension of a head up to which it keeps its shares
PREFILL_TOKENS = 8192  # prompt tokens taken in at once (rlhf/rollout/scheduler.py)
BUCKET = 500_000_000  # DeepSpeed's default of reduce_bucket_size, in elements
PREFETCH = 50_000_000  # of stage3_prefetch_bucket_size
PERSISTENCE = 100_000  # of stage3_param_persistence_threshold
LIVE = 1_000_000_000  # of stage3_max_live_parameters

Parts = Counter[str]  # bytes by what they are for


@dataclass(frozen=True, kw_only=True)
class States:
    """A model at rest, in bytes of one rank: on its device, and in the host's memory or on NVMe."""

    device: Parts
    host: Parts


def uses_torch(zero: ZeroConfig, dtype: Dtype, ranks: int) -> bool:
    """Whether plain torch runs the models (rlhf/engine/build.py)."""
    if zero.engine is TrainingEngine.deepspeed or dtype is Dtype.fp16:
        return False
    return torch_obstacle(zero, ranks=ranks) is None


def weight_bytes(role: Role, zero: ZeroConfig, dtype: Dtype) -> int:
    """Bytes of one weight as the model computes with it."""
    return HALF if has_half_weights(role, zero, dtype) else SINGLE


def model_states(model: ModelUse, *, zero: ZeroConfig, dtype: Dtype, ranks: int) -> States:
    """Weights, gradients, masters, moments and moving average of one model on one rank."""
    role, stage = model.role, stage_of(model.role, zero)
    size = weight_bytes(role, zero, dtype)
    device, host = Counter[str](), Counter[str]()
    shards = ranks if stage == SHARDED_WEIGHTS else 1
    weights = model.weights * size // shards
    is_frozen_int8 = zero.quantize_frozen_weights and stage == SHARDED_WEIGHTS
    if is_frozen_int8:
        frozen = model.weights - model.trained
        weights = (frozen + model.trained * size) // shards
    (host if _offloads_weights(role, zero) else device)["weights"] = weights
    if stage == SHARDED_WEIGHTS:
        device["weights"] += persistent(model, zero) * size
        if 1 < zero.hpz_partition_size < ranks:
            device["weights"] += model.weights * size // zero.hpz_partition_size
    trained = model.trained
    if not trained:
        return States(device=device, host=host)
    half = size == HALF
    if uses_torch(zero, dtype, ranks):
        device["gradients"] = trained * size
        device["optimizer"] = trained * (HALF * half + _moments(zero))
    else:
        share = trained // ranks if stage else trained
        states = share * (SINGLE * half + 2 * SINGLE)
        kept = share if stage > 1 else trained  # from stage 2 on a rank keeps its part alone
        if zero.offload_optimizer and stage > 1:
            host["gradients"] = share * SINGLE
        else:
            device["gradients"] = kept * size
        (host if zero.offload_optimizer else device)["optimizer"] = states
    if model.has_ema:
        share = trained // ranks if stage else trained
        (host if zero.offload_ema else device)["ema"] = share * SINGLE
    return States(device=device, host=host)


def persistent(model: ModelUse, zero: ZeroConfig) -> int:
    """Weights that stage 3 keeps whole on every rank, beside their shards: those of small tensors.

    Vectors, and matrices of adapters.
    """
    limit = zero.param_persistence_threshold
    limit = PERSISTENCE if limit is None else limit
    shape = model.shape
    found = shape.layers * shape.layer_vectors if shape.hidden <= limit else 0
    rank = model.adapters / shape.adapter_weights(1)
    small = sum(side for pair in shape.matrices for side in pair if side * rank <= limit)
    return found + int(shape.layers * rank * small)


def _moments(zero: ZeroConfig) -> int:
    return 2 * (HALF if zero.moments is Moments.bf16 else SINGLE)


def _offloads_weights(role: Role, zero: ZeroConfig) -> bool:
    if stage_of(role, zero) != SHARDED_WEIGHTS:
        return False
    own = {Role.reference: zero.offload_reference, Role.reward: zero.offload_reward}
    return own.get(role, zero.offload_parameters)


def activations(
    model: ModelUse, *, sequences: int, tokens: int, size: int, by_products: bool
) -> int:
    """What one micro-batch of ``sequences`` of ``tokens`` keeps for its backward pass.

    ``by_products``: attention is that by matrix products, not the fused one.
    """
    shape = model.shape
    whole: float = sequences * layer_activations(shape, tokens, size=size, by_products=by_products)
    if by_products:  # its causal mask, which all heads and sequences share
        whole += tokens * tokens * size
    kept = model.layers - model.checkpointed
    inputs = sequences * model.checkpointed * shape.hidden * tokens * size
    # A checkpointed layer is whole while its own backward pass runs.
    return round(kept * whole + inputs + (whole if model.checkpointed else 0))


def layer_activations(shape: ModelShape, tokens: float, *, size: int, by_products: bool) -> float:
    """Bytes that one layer keeps of ``tokens`` tokens, as autograd saves them.

    Norms: each its input and its result; RMSNorm the input in fp32 and the quotient too.
    Attention: queries, keys, values and what it makes of them; where it is ``by_products``,
    keys and values repeated for every head, and the shares of short sequences; where queries
    and keys have norms, their inputs in fp32 and their quotients. The wide part:
    ``wide_copies`` of it, such as the activation's input and result, and where it is gated both
    factors and their product. What transformers' plain attention keeps: its shares in fp32 and,
    where the model is in half precision, in that.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = shape.norms * shape.hidden * (2 * size + (SINGLE if shape.has_rms_norms else 0))
    attention: float = 2 * (queries + (queries if by_products else keys)) * size
    if by_products and tokens <= KEPT_TOKENS * shape.head_dim:
        attention += shape.heads * tokens * size
    if shape.norms_heads:
        attention += (queries + keys) * (SINGLE + size)
    if shape.keeps_scores:
        attention += shape.heads * tokens * (SINGLE if size == SINGLE else SINGLE + size)
    return tokens * (norms + attention + shape.wide_copies * shape.ffn * size)


def scores(shape: ModelShape, *, sequences: int, tokens: int, size: int) -> int:
    """A (tokens, tokens) matrix for every head: attention that is not fused works in some of them.

    Two in a forward pass, scores and shares; three in a backward one. They are of one layer at a
    time, and made for every layer anew.
    """
    return sequences * shape.heads * tokens * tokens * size


def autocast_copies(model: ModelUse, *, size: int, dtype: Dtype) -> int:
    """Half-precision copies of fp32 weights, which autocast makes and a training pass keeps."""
    if dtype is Dtype.fp32 or size == HALF:
        return 0
    return HALF * (model.shape.multiplied + model.adapters)


def logits(model: ModelUse, *, positions: int, size: int) -> int:
    """A chunk's logits and their gradient; a scorer has none."""
    if model.is_scorer:
        return 0
    return min(CHUNK_ROWS, positions) * model.shape.vocab * (SINGLE + size)


def reading(model: ModelUse, *, sequences: int, tokens: int, size: int) -> int:
    """A forward pass without a backward one: the widest layer, and a chunk of logits."""
    shape = model.shape
    wide = sequences * tokens * (4 * shape.hidden + (2 if shape.is_gated else 1) * shape.ffn)
    return wide * size + logits(model, positions=sequences * tokens, size=size)


def reduce_buckets(model: ModelUse, *, zero: ZeroConfig, dtype: Dtype, ranks: int) -> int:
    """What DeepSpeed reduces gradients in, whatever the size of the model.

    Stage 3 keeps it for good; stages 1 and 2 make it for each backward pass, and another where one
    is reduced while the next is filled.
    """
    stage = stage_of(model.role, zero)
    if not model.trained or stage == 0 or uses_torch(zero, dtype, ranks):
        return 0
    pair = 2 if zero.overlap_comm and stage < SHARDED_WEIGHTS else 1
    bucket = zero.reduce_bucket_size or BUCKET
    return pair * bucket * weight_bytes(model.role, zero, dtype)


def live_weights(model: ModelUse, *, zero: ZeroConfig, dtype: Dtype, ranks: int) -> int:
    """Gathered weights of a pass over a sharded model: those in use, and those that come next."""
    is_whole = ranks == 1 and not _offloads_weights(model.role, zero)
    if stage_of(model.role, zero) != SHARDED_WEIGHTS or is_whole:
        return 0
    live = min(zero.max_live_parameters or LIVE, model.weights)
    ahead = min(zero.prefetch_bucket_size or PREFETCH, model.weights)
    return (live + ahead) * weight_bytes(model.role, zero, dtype)


def kv_cache(shape: ModelShape, *, rows: int, tokens: int, size: int) -> int:
    """Keys and values of ``rows`` sequences of ``tokens`` tokens."""
    return rows * tokens * shape.kv_per_token * size
