"""Bytes of one rank, worked by hand, and what autograd really keeps for a backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from rlhf.config.choices import Dtype, MomentsDtype, TrainingEngine
from rlhf.config.roles import Role, runs_on_torch
from rlhf.models.build import ModelSource, build_actor
from rlhf.models.shapes import FAMILIES
from rlhf.plan import memory_model, phase_costs
from rlhf.plan.memory_model import (
    activation_bytes,
    autocast_copy_bytes,
    count_persistent_weights,
    gathered_weight_bytes,
    gradient_bucket_bytes,
    kv_cache_bytes,
    layer_activation_bytes,
    logit_bytes,
    model_state_bytes,
    no_grad_pass_bytes,
)
from tests.models_on_disk import small_tokenizer
from tests.plan.planned import machine, shape, use
from tests.zero_settings import zero_config

RANKS = 4
N = 2816  # weights: 2 layers of 872, and 1072 outside; 2 * 104 + 16 of them are in vectors
DEEPSPEED = {"engine": TrainingEngine.deepspeed}
SHARDED = {"param_persistence_threshold": 0}


def states(
    role: Role = Role.actor,
    *,
    dtype: Dtype = Dtype.bf16,
    ranks: int = RANKS,
    model: dict[str, Any] | None = None,
    **zero: Any,
) -> tuple[dict[str, int], dict[str, int]]:
    """States of a tiny model on its device and on the host."""
    found = model_state_bytes(
        use(role, **(model or {})), zero_config(**zero), machine(dtype=dtype, ranks=ranks)
    )
    return dict(found.device), dict(found.host)


ADAPTED = {"trained": 400, "extra_weights": 400}
EMA = {"fp32_copies": ("ema",)}
ALL = {f"offload_{name}": True for name in ("optimizer", "parameters", "ema")}
STATES = ("weights", "gradients", "optimizer", "ema")
NOTHING = (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("given", "device", "host"),
    [
        # Bytes of each of STATES per weight, on this rank's device and host.
        ({"stage": 0, "model": EMA}, (4, 4, 8, 4), NOTHING),  # autocast over fp32, two moments
        ({"stage": 1, "model": EMA}, (2, 2, 12 / 4, 4 / 4), NOTHING),  # a master too, sharded
        ({"stage": 2}, (2, 2 / 4, 12 / 4, 0), NOTHING),
        ({"stage": 3}, (2 / 4, 2 / 4, 12 / 4, 0), NOTHING),
        ({"stage": 1, "dtype": Dtype.fp32}, (4, 4, 8 / 4, 0), NOTHING),  # no masters
        # the torch engine: the lower half of a master, and two moments
        ({"stage": 1, "ranks": 1}, (2, 2, 2 + 8, 0), NOTHING),
        ({"stage": 1, "ranks": 1, "moments": MomentsDtype.bf16}, (2, 2, 2 + 4, 0), NOTHING),
        ({"stage": 1, "ranks": 1, "dtype": Dtype.fp32}, (4, 4, 8, 0), NOTHING),
        # an offloaded optimizer has gradients of its own from stage 2 on; weights go at stage 3
        ({"stage": 1, "offload_optimizer": True}, (2, 2, 0, 0), (0, 0, 12 / 4, 0)),
        (
            {"stage": 2, "offload_optimizer": True, "offload_parameters": True},
            *((2, 0, 0, 0), (0, 4 / 4, 12 / 4, 0)),
        ),
        ({"stage": 3, "model": EMA, **ALL}, NOTHING, (2 / 4, 4 / 4, 12 / 4, 4 / 4)),
        # frozen models have weights only
        ({"role": Role.reference, "stage": 2}, (2, 0, 0, 0), NOTHING),
        ({"role": Role.reference, "stage": 0}, (4, 0, 0, 0), NOTHING),
        ({"role": Role.reward, "stage": 3}, (2 / 4, 0, 0, 0), NOTHING),
        (
            {"role": Role.reference, "stage": 1, "reference_stage": 3, "offload_reference": True},
            *(NOTHING, (2 / 4, 0, 0, 0)),
        ),
        (
            {"role": Role.reward, "stage": 1, "critic_stage": 3, "offload_reward": True},
            *(NOTHING, (2 / 4, 0, 0, 0)),
        ),
        ({"role": Role.critic, "stage": 1, "critic_stage": 2}, (2, 2 / 4, 12 / 4, 0), NOTHING),
    ],
)
def test_states(given: dict[str, Any], device: tuple[float, ...], host: tuple[float, ...]) -> None:
    weights = use(given.get("role", Role.actor)).weights
    for found, per_weight in zip(states(**SHARDED | given), (device, host), strict=True):
        assert set(found) <= set(STATES)
        expected = [weights * each for each in per_weight]
        assert [found.get(name, 0) for name in STATES] == expected


def test_only_adapters_have_gradients_and_states() -> None:
    device, _ = states(stage=2, model=ADAPTED)
    assert device == {"weights": 2 * (N + 400), "gradients": 200, "optimizer": 1200}


def test_which_engine_runs_the_models() -> None:
    zero = zero_config(stage=1)
    assert runs_on_torch(zero, dtype=Dtype.bf16, ranks=1)
    assert not runs_on_torch(zero, dtype=Dtype.bf16, ranks=2)
    assert not runs_on_torch(zero, dtype=Dtype.fp16, ranks=1)
    assert not runs_on_torch(zero_config(**DEEPSPEED), dtype=Dtype.bf16, ranks=1)
    assert not runs_on_torch(
        zero_config(stage=1, offload_optimizer=True), dtype=Dtype.bf16, ranks=1
    )


def test_a_second_copy_of_the_weights_lies_in_each_node() -> None:
    plain, _ = states(stage=3, ranks=16, **SHARDED)
    twice, _ = states(stage=3, ranks=16, hpz_partition_size=8, **SHARDED)
    assert plain["weights"] == 2 * N // 16
    assert twice["weights"] == 2 * N // 16 + 2 * N // 8
    # All ranks are the node's: that would be the same shards once more.
    one_node, _ = states(stage=3, ranks=8, hpz_partition_size=8, **SHARDED)
    assert one_node["weights"] == 2 * N // 8


def test_frozen_weights_below_adapters_may_be_int8() -> None:
    keys = {"stage": 3, "quantize_frozen_weights": True}
    device, _ = states(dtype=Dtype.fp16, model=ADAPTED, **keys, **SHARDED)
    assert device["weights"] == (N + 2 * 400) // 4


@pytest.mark.parametrize(
    ("threshold", "adapters", "found"),
    [
        (0, 0, 0),
        (7, 0, 0),
        (8, 0, 2 * 104),  # vectors are of 8 or 32, counted by the smaller
        (None, 0, 2 * 104),
        # Rank 2: sides of 8 give 16 weights, those of 32 give 64; 10 and 2 of them in a layer.
        (16, 2 * 2 * 144, 2 * 104 + 2 * 2 * 10 * 8),
        (64, 2 * 2 * 144, 2 * 104 + 2 * 2 * 144),
    ],
)
def test_small_tensors_stay_whole(threshold: int | None, adapters: int, found: int) -> None:
    model = use(extra_weights=adapters)
    zero = zero_config(stage=3, param_persistence_threshold=threshold)
    assert count_persistent_weights(model, zero) == found


def test_persistent_weights_come_on_top_of_the_shards() -> None:
    device, _ = states(stage=3)
    assert device["weights"] == 2 * N // 4 + 2 * 2 * 104


# h = 8, 2 heads of 4, ffn 32 with relu, 5 tokens, 3 sequences, 2 bytes:
# norms 2 * 2 * 8, queries, keys, values and their mixture 4 * 8, the wide part 32: 96.
SHAPES = {"sequences": 3, "tokens": 5, "size": 2, "uses_matmul_attention": False}
KEPT, INPUTS = 3 * 5 * 96 * 2, 3 * 5 * 8 * 2  # of a layer


def test_activations_by_hand() -> None:
    assert activation_bytes(use(), **SHAPES) == 2 * KEPT
    mask, shares = 5 * 5 * 2, 3 * 2 * 5 * 5 * 2
    by_products = SHAPES | {"uses_matmul_attention": True}
    assert activation_bytes(use(), **by_products) == 2 * (KEPT + shares + mask)
    long = by_products | {"tokens": 13}  # more than three for each of a head's four dimensions
    assert activation_bytes(use(), **long) == 2 * (3 * 13 * 96 * 2 + 13 * 13 * 2)


# Numbers of a token with 8 hidden, 4 heads of 2, 2 of keys and values, 20 wide:
# norms 2 * 8 times input and result, RMSNorm's quotient, and its input in fp32.
GROUPED = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 9}
GROUPED |= {"num_key_value_heads": 2, "intermediate_size": 20, "head_dim": 2}
BLOOM = {"hidden_size": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9}


@pytest.mark.parametrize(
    ("family", "size", "uses_matmul_attention", "found"),
    [
        ("llama", 2, False, 16 * (4 + 2 * 2) + 2 * (2 * 8 + 2 * 4) + 2 * 4 * 20),
        ("llama", 4, False, 16 * (4 + 2 * 4) + 4 * (2 * 8 + 2 * 4) + 4 * 4 * 20),
        ("llama", 2, True, 16 * (4 + 2 * 2) + 2 * (4 * 8) + 2 * 4 * 20),  # keys for every head
        # The inputs of norms of queries and keys in fp32, and their quotients.
        ("qwen3", 2, True, 16 * 8 + 2 * 32 + (8 + 4) * (4 + 2) + 2 * 4 * 20),
        # Norms 2 * 2 * 8, attention 4 * 8, the wide part 2 * 32, and the shares of 2 heads and 7
        # tokens, in half precision in fp32 too.
        ("bloom", 2, False, 2 * (32 + 32 + 64) + 2 * 7 * (4 + 2)),
        ("bloom", 4, False, 4 * (32 + 32 + 64) + 2 * 7 * 4),
    ],
)
def test_activations_of_a_layer_by_hand(
    family: str, size: int, uses_matmul_attention: bool, found: int
) -> None:
    of, how = FAMILIES[family](BLOOM if family == "bloom" else GROUPED), {"size": size}
    kept = layer_activation_bytes(of, 7, **how, uses_matmul_attention=uses_matmul_attention)
    assert kept == 7 * found


def test_checkpointed_layers_keep_their_input() -> None:
    # Two inputs, and the layer that is just computed again.
    assert activation_bytes(use(checkpointed=2), **SHAPES) == 2 * INPUTS + KEPT
    assert activation_bytes(use(checkpointed=1), **SHAPES) == KEPT + INPUTS + KEPT
    some = use(shape=shape(num_hidden_layers=10), checkpointed=7)
    assert activation_bytes(some, **SHAPES) == 3 * KEPT + 7 * INPUTS + KEPT


def test_layers_below_all_that_learns_keep_nothing() -> None:
    assert activation_bytes(use(layers=1), **SHAPES) == KEPT


def test_logits_are_there_in_blocks() -> None:
    # Logits in the model's precision; the softmax of at most 256 positions, twice in fp32.
    gpu, cpu = (partial(logit_bytes, size=2, is_gpu=is_gpu) for is_gpu in (True, False))
    assert gpu(use(), positions=10) == cpu(use(), positions=10) == 10 * 100 * (2 + 8)
    assert gpu(use(), positions=10_000) == 100 * (1024 * 2 + 256 * 8)
    assert cpu(use(), positions=10_000) == 100 * (1024 * 2 + 256 * 8)
    wide = use(shape=shape(vocab_size=5_000))
    assert gpu(wide, positions=10_000) == 5_000 * (1024 * 2 + 256 * 8)
    assert cpu(wide, positions=10_000) == 2048 * (1024 * 2 + 256 * 8)
    assert gpu(use(Role.critic), positions=10) == 0


def test_reading_keeps_one_layer_or_the_logits() -> None:
    # 15 tokens of 2 * 8 numbers, and of 2 * 32 in the layer or their logits.
    reading = partial(no_grad_pass_bytes, sequences=3, tokens=5, size=2, is_gpu=False)
    assert reading(use()) == 15 * 16 * 2 + 15 * 100 * (2 + 8)
    assert reading(use(Role.reward)) == 15 * (16 + 64) * 2
    assert reading(use(Role.reward, extra_weights=1)) == 15 * (16 + 128) * 2


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"stage": 0}, 0),
        ({"stage": 1}, 2 * 1000 * 2),  # one is filled while the other is reduced
        ({"stage": 2, "overlap_comm": False}, 1000 * 2),
        ({"stage": 3}, 1000 * 2),
        ({"stage": 2, "reduce_bucket_size": None}, 2 * 500_000_000 * 2),  # DeepSpeed's default
    ],
)
def test_what_gradients_are_reduced_in(keys: dict[str, Any], found: int) -> None:
    zero = zero_config(**{"reduce_bucket_size": 1000} | keys)
    assert gradient_bucket_bytes(use(), zero, machine()) == found
    assert gradient_bucket_bytes(use(Role.reference), zero, machine()) == 0
    alone = gradient_bucket_bytes(use(), zero, machine(ranks=1))
    assert alone == 0  # torch has none


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"stage": 2}, 0),
        ({"stage": 3}, 2 * N * 2),  # so small a model is whole, and comes next
        ({"stage": 3, "max_live_parameters": 700, "prefetch_bucket_size": 300}, (700 + 300) * 2),
    ],
)
def test_weights_that_are_gathered_for_a_pass(keys: dict[str, Any], found: int) -> None:
    zero = zero_config(**keys)
    assert gathered_weight_bytes(use(), zero, machine()) == found
    assert gathered_weight_bytes(use(), zero, machine(ranks=1)) == 0


def test_offloaded_weights_come_to_one_rank_too() -> None:
    zero = zero_config(stage=3, offload_parameters=True)
    alone = machine(ranks=1)
    assert gathered_weight_bytes(use(), zero, alone) == 2 * N * 2
    reference = gathered_weight_bytes(use(Role.reference), zero, alone)
    assert reference == 0  # it is not offloaded


def test_autocast_copies_matrices() -> None:
    matrices = 2 * 768
    model = use(extra_weights=10)
    assert autocast_copy_bytes(model, size=4, dtype=Dtype.bf16) == 2 * (matrices + 10)
    assert autocast_copy_bytes(model, size=2, dtype=Dtype.bf16) == 0
    assert autocast_copy_bytes(model, size=4, dtype=Dtype.fp32) == 0


def test_keys_and_values() -> None:
    # 3 rows of 5 tokens; keys and values of 2 layers, 2 heads of 4.
    assert kv_cache_bytes(shape(), rows=3, tokens=5, size=2) == 3 * 5 * 2 * 2 * 8 * 2


WIDE = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
BLOCKS = {
    "opt": WIDE | {"ffn_dim": 256, "word_embed_proj_dim": 64},
    "llama": WIDE | {"intermediate_size": 160},
    "mistral": WIDE | {"intermediate_size": 160, "num_key_value_heads": 2},
    "qwen2": WIDE | {"intermediate_size": 160, "num_key_value_heads": 2},
    "qwen3": WIDE | {"intermediate_size": 160, "num_key_value_heads": 2, "head_dim": 16},
    "gpt_neox": WIDE | {"intermediate_size": 256},
    "gpt2": {"n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 128},
    "bloom": {"hidden_size": 64, "n_layer": 6, "n_head": 4},
}
SEQUENCES, TOKENS = 3, 64


def saved_bytes(module: Any, ids_BS: torch.Tensor) -> int:
    """What a forward pass leaves for the backward one; parameters and buffers are there anyway."""
    owned = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in owned:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    unpack: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        module.base_model(input_ids=ids_BS, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "attention", "dtype", "checkpointing"),
    [
        # transformers has BLOOM with plain attention only.
        *((f, None, torch.bfloat16, False) for f in BLOCKS),
        *((f, "sdpa", torch.float32, False) for f in BLOCKS if f != "bloom"),
        ("bloom", None, torch.float32, 3),
        ("opt", "sdpa", torch.bfloat16, 3),
        ("llama", None, torch.float32, True),
    ],
)
def test_what_autograd_keeps(
    family: str, dtype: torch.dtype, attention: str | None, checkpointing: bool | int
) -> None:
    tokenizer = small_tokenizer()
    fields = {"model_type": family, "vocab_size": len(tokenizer), **BLOCKS[family]}
    source = ModelSource(
        key="model",
        path=None,
        architecture=fields,
        attention=attention,
        gradient_checkpointing=checkpointing,
    )
    module = build_actor(source, tokenizer, seed=1).to(dtype).train()
    ids_BS = torch.arange(SEQUENCES * TOKENS).view(SEQUENCES, TOKENS)
    again = {False: 0, 3: 3, True: 6}[checkpointing]
    how = {"sequences": SEQUENCES, "tokens": TOKENS, "size": dtype.itemsize}
    how["uses_matmul_attention"] = attention is None and family != "bloom"
    of = FAMILIES[family](fields)
    predicted = activation_bytes(use(shape=of, checkpointed=again), **how)
    if again:  # autograd sees the layer that is computed again only in the backward pass
        predicted -= activation_bytes(use(shape=of, layers=1), **how)
    measured = saved_bytes(module, ids_BS)
    last_norm = SEQUENCES * TOKENS * 64 * 12 if again == 6 else 0  # then it is not small
    assert abs(measured - predicted) <= 0.15 * measured + last_norm


def test_constants_are_those_of_the_code_that_planning_may_not_import() -> None:
    from rlhf.engine import masters
    from rlhf.kernels.cpu import cpu_layers
    from rlhf.models import output_layer as logprobs
    from rlhf.rollout import scheduler

    assert memory_model.CPU_BLOCK == logprobs.CPU_BLOCK
    assert memory_model.GPU_BLOCK == logprobs.GPU_BLOCK
    assert memory_model.TORCH_TOKENS == logprobs.TORCH_TOKENS
    assert memory_model.KEPT_TOKENS == cpu_layers.KEPT_TOKENS
    assert memory_model.LONGEST == cpu_layers.LONGEST
    assert memory_model.PREFILL_TOKENS == scheduler.PREFILL_TOKENS
    assert phase_costs.ROUNDED_AT_ONCE == masters.CHUNK
