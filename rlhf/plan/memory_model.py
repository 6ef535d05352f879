"""Compute the bytes of one rank: model states, activations, logits, buffers and KV cache.

Model states follow ZeRO (https://arxiv.org/abs/1910.02054, section 5) as DeepSpeed 0.19.8 keeps
them. Activations follow Korthikanti et al. (https://arxiv.org/abs/2205.05198, section 4), without
dropout.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from rlhf.config.choices import Dtype, MomentsDtype
from rlhf.config.machine_rates import Machine
from rlhf.config.roles import SHARDED_WEIGHTS, Role, has_16_bit_weights, runs_on_torch, stage_of
from rlhf.models.model_uses import ModelUse
from rlhf.models.shapes import ModelShape
from rlhf.options import ZeroConfig

HALF, SINGLE = 2, 4  # bytes per element
CPU_BLOCK = (1024, 2048)  # tokens and vocabulary entries whose logits exist at the same time
GPU_BLOCK = (1024, None)  # None: all vocabulary entries (rlhf/models/output_layer.py)
# Without a kernel, torch copies the logits of this many tokens in fp32: once, or if they are 16-bit
# numbers, twice.
TORCH_TOKENS = 256
MATMUL_TOKENS = 512  # most tokens per sequence for matmul attention (kernels/cpu/cpu_layers.py)
KEPT_TOKENS = 3  # matmul attention keeps probabilities if tokens <= this times the head size
PREFILL_TOKENS = 8192  # prompt tokens per prefill pass (rlhf/rollout/scheduler.py)
PAGE_TOKENS = 512  # tokens per page of a KV cache (CHUNK in rlhf/kernels/gpu/attention_gpu.py)
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


@dataclass(frozen=True, kw_only=True)
class MemorySetting:
    """The machine and the ZeRO setting for which bytes are computed."""

    machine: Machine
    zero: ZeroConfig

    def stage(self, model: ModelUse) -> int:
        """Return the ZeRO stage of ``model``."""
        return stage_of(model.role, self.zero)

    def is_sharded(self, model: ModelUse) -> bool:
        """Return True if ZeRO shards the weights of ``model`` over the ranks."""
        return self.stage(model) == SHARDED_WEIGHTS

    def bytes_per_weight(self, model: ModelUse) -> int:
        """Return the bytes per weight in the precision in which ``model`` computes."""
        is_half = has_16_bit_weights(model.role, self.zero, self.machine.dtype)
        return HALF if is_half else SINGLE

    def runs_on_torch(self, model: ModelUse) -> bool:
        """Return True if the torch engine runs ``model``, False if DeepSpeed does."""
        machine, needs = self.machine, model.needs_deepspeed
        return runs_on_torch(
            self.zero, ranks=machine.ranks, dtype=machine.dtype, needs_deepspeed=needs
        )

    def offloads_weights(self, model: ModelUse) -> bool:
        """Return True if sharded weights are kept in the host's memory or on NVMe."""
        zero = self.zero
        of_frozen = {Role.reference: zero.offload_reference, Role.reward: zero.offload_reward}
        return self.is_sharded(model) and of_frozen.get(model.role, zero.offload_parameters)


def uses_matmul_attention(tokens: float, *, is_gpu: bool) -> bool:
    """Return True if attention uses matrix products, and False if it uses the fused kernel."""
    return not is_gpu and tokens <= MATMUL_TOKENS


def model_state_bytes(at: MemorySetting, model: ModelUse) -> ModelStates:
    """Return the bytes on one rank of a model's weights, gradients, optimizer and fp32 copies."""
    zero, ranks = at.zero, at.machine.ranks
    stage, size = at.stage(model), at.bytes_per_weight(model)
    device, host = Counter[str](), Counter[str]()
    shards = ranks if stage == SHARDED_WEIGHTS else 1
    weights = model.weights * size // shards
    if zero.quantize_frozen_weights and stage == SHARDED_WEIGHTS:  # to int8
        weights = (model.weights - model.trained + model.trained * size) // shards
    (host if at.offloads_weights(model) else device)["weights"] = weights
    if stage == SHARDED_WEIGHTS:
        device["weights"] += count_persistent_weights(model, zero) * size
        if 1 < zero.hpz_partition_size < ranks:
            device["weights"] += model.weights * size // zero.hpz_partition_size
    trained = model.trained
    if not trained:
        return ModelStates(device=device, host=host)
    half, share = size == HALF, trained // ranks if stage else trained
    if at.runs_on_torch(model):
        device["gradients"] = trained * size
        moment = HALF if zero.moments is MomentsDtype.bf16 else SINGLE
        device["optimizer"] = trained * (HALF * half + 2 * moment)
    else:
        if zero.offload_optimizer and stage > 1:
            host["gradients"] = share * SINGLE
        else:  # from stage 2 on, a rank keeps only its shard
            device["gradients"] = (share if stage > 1 else trained) * size
        states = share * (SINGLE * half + 2 * SINGLE)
        (host if zero.offload_optimizer else device)["optimizer"] = states
    for name in model.fp32_copies:
        (host if getattr(zero, f"offload_{name}") else device)[name] = share * SINGLE
    return ModelStates(device=device, host=host)


def count_persistent_weights(model: ModelUse, zero: ZeroConfig) -> int:
    """Return the number of weights that ZeRO stage 3 keeps on every rank in addition to its shard.

    DeepSpeed keeps tensors of up to param_persistence_threshold elements: biases, norms, adapters.
    """
    limit = zero.param_persistence_threshold
    limit = PERSISTENCE if limit is None else limit
    shape = model.shape
    vectors = shape.layers * shape.layer_vectors if shape.hidden <= limit else 0
    rank = model.extra_weights / shape.adapter_weights(1)
    small = sum(side for pair in shape.matrices for side in pair if side * rank <= limit)
    return vectors + int(shape.layers * rank * small)


def activation_bytes(at: MemorySetting, model: ModelUse, *, sequences: int, tokens: int) -> int:
    """Return the bytes stored for the backward pass of sequences with ``tokens`` tokens each."""
    shape, size = model.shape, at.bytes_per_weight(model)
    is_matmul = uses_matmul_attention(tokens, is_gpu=at.machine.is_gpu)
    per_sequence = layer_activation_bytes(shape, tokens, size=size, uses_matmul_attention=is_matmul)
    whole = sequences * per_sequence
    if is_matmul:  # the causal mask, shared by all heads and sequences
        whole += tokens * tokens * size
    kept = model.layers - model.checkpointed
    inputs = sequences * model.checkpointed * shape.hidden * tokens * size
    # A checkpointed layer recomputes all its activations for its own backward pass.
    return round(kept * whole + inputs + (whole if model.checkpointed else 0))


def layer_activation_bytes(
    shape: ModelShape, tokens: float, *, size: int, uses_matmul_attention: bool
) -> float:
    """Return the bytes that autograd saves in one layer for one sequence of ``tokens`` tokens.

    ``size`` is the bytes per element.

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


def attention_bytes(
    at: MemorySetting, model: ModelUse, *, sequences: int, tokens: int, matrices: int
) -> int:
    """Return the bytes of (tokens, tokens) attention matrices; 0 if attention is fused.

    ``matrices`` is their number per head and sequence: two in a forward pass (scores and
    probabilities), three in a backward pass. Only one layer holds them at a time.
    """
    is_matmul = uses_matmul_attention(tokens, is_gpu=at.machine.is_gpu)
    if not (is_matmul or model.shape.keeps_scores):
        return 0
    return matrices * sequences * model.shape.heads * tokens**2 * at.bytes_per_weight(model)


def autocast_copy_bytes(at: MemorySetting, model: ModelUse) -> int:
    """Return the bytes of half-precision weight copies that autocast keeps in a training pass."""
    if at.machine.dtype is Dtype.fp32 or at.bytes_per_weight(model) == HALF:
        return 0
    return HALF * (model.shape.linear_layer_weights + model.extra_weights)


def logit_bytes(at: MemorySetting, model: ModelUse, *, positions: int) -> int:
    """Return the bytes of one block of logits and of torch's fp32 copies; 0 for a scorer."""
    if model.is_scorer:
        return 0
    most, entries = GPU_BLOCK if at.machine.is_gpu else CPU_BLOCK
    width = min(entries or model.shape.vocab, model.shape.vocab)
    size, copies = at.bytes_per_weight(model), 2
    if at.machine.fp32_logits:
        size, copies = SINGLE, 1
    return width * (min(most, positions) * size + min(TORCH_TOKENS, positions) * copies * SINGLE)


def no_grad_pass_bytes(at: MemorySetting, model: ModelUse, *, sequences: int, tokens: int) -> int:
    """Return the most bytes in use in a pass without gradients: a feed-forward layer or logits.

    The layer holds its input and its normed input. It also holds the input and the output of its
    activation or, if it is gated, the activation's output, the other factor and their product. An
    adapter adds two matrices: its output, and the sum of its and the layer's output. Beside the
    logits there are the last layer's output and its normed output.
    """
    shape, size = model.shape, at.bytes_per_weight(model)
    matrices = 2 + shape.is_gated + 2 * (model.extra_weights > 0)
    logits = logit_bytes(at, model, positions=sequences * tokens)
    outputs = sequences * tokens * 2 * shape.hidden * size
    return outputs + max(sequences * tokens * matrices * shape.ffn * size, logits)


def gradient_bucket_bytes(at: MemorySetting, model: ModelUse) -> int:
    """Return the bytes of DeepSpeed's gradient buckets; their size is fixed by the configuration.

    Stage 3 keeps its bucket allocated. Stages 1 and 2 allocate one bucket per backward pass. With
    overlap_comm they allocate a second bucket, to fill it while the first is reduced.
    """
    if not model.trained or at.stage(model) == 0 or at.runs_on_torch(model):
        return 0
    pair = 2 if at.zero.overlap_comm and not at.is_sharded(model) else 1
    return pair * (at.zero.reduce_bucket_size or BUCKET) * at.bytes_per_weight(model)


def gathered_weight_bytes(at: MemorySetting, model: ModelUse) -> int:
    """Return the bytes of gathered weights, in use or prefetched, in a pass of a sharded model."""
    is_whole = at.machine.ranks == 1 and not at.offloads_weights(model)
    if not at.is_sharded(model) or is_whole:
        return 0
    live = min(at.zero.max_live_parameters or LIVE, model.weights)
    ahead = min(at.zero.prefetch_bucket_size or PREFETCH, model.weights)
    return (live + ahead) * at.bytes_per_weight(model)


def kv_cache_bytes(shape: ModelShape, *, rows: int, tokens: int, size: int) -> int:
    """Return the bytes of the KV cache of ``rows`` sequences of ``tokens`` tokens."""
    return rows * tokens * shape.kv_elements_per_token * size


def shared_page_tokens(rows: int, *, longest: int, mean: int) -> int:
    """Return the tokens for which pages are allocated that ``rows`` of ``mean`` tokens share.

    The longest row has ``longest`` tokens. One page takes what is never read.
    """
    pages = max(rows * math.ceil(mean / PAGE_TOKENS), math.ceil(longest / PAGE_TOKENS))
    return (pages + 1) * PAGE_TOKENS


def backward_peak(
    at: MemorySetting,
    model: ModelUse,
    *,
    tokens: int,
    positions: int,
    activations: int,
    attention: int,
    gradients: int,
    is_first: bool,
) -> Parts:
    """Return the peak bytes by purpose of a backward pass: in the head, layers or embedding.

    ``tokens`` and ``positions`` (tokens with logits) are counted over all sequences.
    ``activations`` are the bytes stored for the pass, ``attention`` those of one layer's matrices,
    and ``gradients`` those of all weight gradients. In the first pass of a step (``is_first``),
    gradients are allocated while activations are freed. On a CPU, temporary gradients fit into the
    freed memory that the process keeps.
    """
    shape, size, head, hidden, layer, again = model.shape, at.bytes_per_weight(model), 0, 0, 0, 0
    if at.machine.is_gpu:
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
    moments = (
        Counter(
            gradients=before + head,
            activations=activations - again + hidden,
            logits=logit_bytes(at, model, positions=positions),
        ),
        # In the last layer, while all other layers still store their activations.
        Counter(
            gradients=before + (head if is_first else tied),
            activations=activations + layer + attention,
        ),
        Counter(gradients=gradients + (tied if is_first else 2 * tied)),
    )
    return max(moments, key=Counter.total)
