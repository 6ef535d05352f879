"""Bytes of one rank, worked by hand, and what autograd really keeps for a backward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf.config.choices import Dtype, MomentsDtype, TrainingEngine
from rlhf.config.roles import Role
from rlhf.models.build import ModelSource, build_actor
from rlhf.models.shapes import FAMILIES
from rlhf.plan import memory_model, phase_costs
from rlhf.plan.memory_model import (
    MemorySetting,
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
SHARDED = {"param_persistence_threshold": 0}


def at(
    dtype: Dtype = Dtype.bf16, *, ranks: int = RANKS, is_gpu: bool = True, **zero: Any
) -> MemorySetting:
    """Machine and ZeRO setting; stage 1 if ``zero`` names no other."""
    of = machine(dtype=dtype, ranks=ranks, is_gpu=is_gpu)
    return MemorySetting(machine=of, zero=zero_config(**{"stage": 1} | zero))


def states(
    role: Role = Role.actor, *, model: dict[str, Any] | None = None, **setting: Any
) -> tuple[dict[str, int], dict[str, int]]:
    """States of a tiny model on its device and on the host."""
    found = model_state_bytes(at(**setting), use(role, **(model or {})))
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


INT8 = {"stage": 3, "quantize_frozen_weights": True, "dtype": Dtype.fp16}


@pytest.mark.parametrize(
    ("given", "name", "found"),
    [
        # Only adapters have gradients and states; the frozen weights below them may be int8.
        ({"stage": 2, "model": ADAPTED}, "weights", 2 * (N + 400)),
        ({"stage": 2, "model": ADAPTED}, "gradients", 200),
        ({"stage": 2, "model": ADAPTED}, "optimizer", 1200),
        (INT8 | {"model": ADAPTED}, "weights", (N + 2 * 400) // 4),
        # A second copy of the weights lies in each node, unless all ranks are the node's.
        ({"stage": 3, "ranks": 16}, "weights", 2 * N // 16),
        ({"stage": 3, "ranks": 16, "hpz_partition_size": 8}, "weights", 2 * N // 16 + 2 * N // 8),
        ({"stage": 3, "ranks": 8, "hpz_partition_size": 8}, "weights", 2 * N // 8),
    ],
)
def test_adapters_and_copies(given: dict[str, Any], name: str, found: int) -> None:
    assert states(**SHARDED | given)[0][name] == found


@pytest.mark.parametrize(
    ("setting", "is_torch"),
    [
        ({"ranks": 1}, True),
        ({"ranks": 2}, False),
        ({"ranks": 1, "dtype": Dtype.fp16}, False),
        ({"ranks": 1, "engine": TrainingEngine.deepspeed}, False),
        ({"ranks": 1, "offload_optimizer": True}, False),
    ],
)
def test_which_engine_runs_the_models(setting: dict[str, Any], is_torch: bool) -> None:
    assert at(**setting).runs_on_torch(use()) is is_torch


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
    kept = model_state_bytes(MemorySetting(machine=machine(), zero=zero), model)
    assert kept.device["weights"] == 2 * model.weights // 4 + 2 * found  # on top of the shards


# h = 8, 2 heads of 4, ffn 32 with relu, 5 tokens, 3 sequences, 2 bytes:
# norms 2 * 2 * 8, queries, keys, values and their mixture 4 * 8, the wide part 32: 96.
BATCH = {"sequences": 3, "tokens": 5}
KEPT, INPUTS = 3 * 5 * 96 * 2, 3 * 5 * 8 * 2  # of a layer


def test_activations_by_hand() -> None:
    assert activation_bytes(at(), use(), **BATCH) == 2 * KEPT
    mask, shares = 5 * 5 * 2, 3 * 2 * 5 * 5 * 2
    cpu = at(is_gpu=False)  # by matrix products
    assert activation_bytes(cpu, use(), **BATCH) == 2 * (KEPT + shares + mask)
    long = BATCH | {"tokens": 13}  # more than three for each of a head's four dimensions
    assert activation_bytes(cpu, use(), **long) == 2 * (3 * 13 * 96 * 2 + 13 * 13 * 2)


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


def test_layers_that_are_computed_again_or_do_not_learn() -> None:
    # Two inputs, and the layer that is just computed again.
    assert activation_bytes(at(), use(checkpointed=2), **BATCH) == 2 * INPUTS + KEPT
    assert activation_bytes(at(), use(checkpointed=1), **BATCH) == KEPT + INPUTS + KEPT
    some = use(shape=shape(num_hidden_layers=10), checkpointed=7)
    assert activation_bytes(at(), some, **BATCH) == 3 * KEPT + 7 * INPUTS + KEPT
    assert activation_bytes(at(), use(layers=1), **BATCH) == KEPT  # below all that learns


def test_logits_are_there_in_blocks() -> None:
    # Logits in the model's precision; the softmax of at most 256 positions, twice in fp32.
    wide = use(shape=shape(vocab_size=5_000))
    for setting, most in ((at(), 5_000), (at(is_gpu=False), 2048)):
        assert logit_bytes(setting, use(), positions=10) == 10 * 100 * (2 + 8)
        assert logit_bytes(setting, use(), positions=10_000) == 100 * (1024 * 2 + 256 * 8)
        assert logit_bytes(setting, wide, positions=10_000) == most * (1024 * 2 + 256 * 8)
        assert logit_bytes(setting, use(Role.critic), positions=10) == 0


def test_reading_keeps_one_layer_or_the_logits() -> None:
    # 15 tokens of 2 * 8 numbers, and of 2 * 32 in the layer or their logits.
    for model, found in (
        (use(), 15 * 16 * 2 + 15 * 100 * (2 + 8)),
        (use(Role.reward), 15 * (16 + 64) * 2),
        (use(Role.reward, extra_weights=1), 15 * (16 + 128) * 2),
    ):
        assert no_grad_pass_bytes(at(is_gpu=False), model, **BATCH) == found


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
    keys = {"reduce_bucket_size": 1000} | keys
    assert gradient_bucket_bytes(at(**keys), use()) == found
    assert gradient_bucket_bytes(at(**keys), use(Role.reference)) == 0
    assert gradient_bucket_bytes(at(**keys, ranks=1), use()) == 0  # torch has none


@pytest.mark.parametrize(
    ("keys", "found", "alone"),
    [
        ({"stage": 2}, 0, 0),
        ({"stage": 3}, 2 * N * 2, 0),  # so small a model is whole, and comes next
        ({"stage": 3, "max_live_parameters": 700, "prefetch_bucket_size": 300}, 1000 * 2, 0),
        ({"stage": 3, "offload_parameters": True}, 2 * N * 2, 2 * N * 2),
    ],
)
def test_weights_that_are_gathered_for_a_pass(keys: dict[str, Any], found: int, alone: int) -> None:
    assert gathered_weight_bytes(at(**keys), use()) == found
    assert gathered_weight_bytes(at(**keys, ranks=1), use()) == alone
    assert gathered_weight_bytes(at(**keys, ranks=1), use(Role.reference)) == 0  # not offloaded


def test_autocast_copies_matrices() -> None:
    model = use(extra_weights=10)
    assert autocast_copy_bytes(at(stage=0), model) == 2 * (2 * 768 + 10)
    assert autocast_copy_bytes(at(), model) == autocast_copy_bytes(at(Dtype.fp32), model) == 0


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
    precision = Dtype.bf16 if dtype is torch.bfloat16 else Dtype.fp32
    how = {"sequences": SEQUENCES, "tokens": TOKENS}
    setting = at(precision, is_gpu=attention is not None or family == "bloom")
    of = FAMILIES[family](fields)
    predicted = activation_bytes(setting, use(shape=of, checkpointed=again), **how)
    if again:  # autograd sees the layer that is computed again only in the backward pass
        predicted -= activation_bytes(setting, use(shape=of, layers=1), **how)
    measured = saved_bytes(module, ids_BS)
    last_norm = SEQUENCES * TOKENS * 64 * 12 if again == 6 else 0  # then it is not small
    assert abs(measured - predicted) <= 0.15 * measured + last_norm


def test_constants_are_those_of_the_code_that_planning_may_not_import() -> None:
    from rlhf.engine import masters
    from rlhf.kernels.cpu import cpu_layers
    from rlhf.kernels.gpu import attention_gpu
    from rlhf.models import output_layer as logprobs
    from rlhf.rollout import scheduler

    assert memory_model.CPU_BLOCK == logprobs.CPU_BLOCK
    assert memory_model.GPU_BLOCK == logprobs.GPU_BLOCK
    assert memory_model.TORCH_TOKENS == logprobs.TORCH_TOKENS
    assert memory_model.KEPT_TOKENS == cpu_layers.KEPT_TOKENS
    assert memory_model.MATMUL_TOKENS == cpu_layers.LONGEST
    assert memory_model.PREFILL_TOKENS == scheduler.PREFILL_TOKENS
    assert memory_model.PAGE_TOKENS == attention_gpu.CHUNK
    for rows, longest, mean in ((1, 513, 1), (7, 8704, 2305), (3, 512, 512)):
        shared = attention_gpu.count_shared_pages(rows, longest, mean) + 1  # one is never read
        planned = memory_model.shared_page_tokens(rows, longest=longest, mean=mean)
        assert planned == shared * attention_gpu.CHUNK
    assert phase_costs.ROUNDED_AT_ONCE == masters.CHUNK
