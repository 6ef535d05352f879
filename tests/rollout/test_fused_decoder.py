"""The decoders of the known families, in torch and compiled: the shared checks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rlhf.base.cpu import MAX_ISA, Isa, read_cpu
from rlhf.base.errors import CapabilityError
from rlhf.models.families import FAMILIES as TABLE
from rlhf.models.families import find_decoder_modules
from rlhf.models.language_model import LanguageModel
from rlhf.options.lora.models import adapter_of
from rlhf.rollout.decoders import projections
from rlhf.rollout.decoders.compiled import CompiledDecoder, can_compile
from rlhf.rollout.decoders.fused import FusedDecoder
from rlhf.rollout.decoders.projections import ACTIVATIONS
from rlhf.rollout.decoders.via_cache import CacheDecoder
from tests.rollout.decoder_checks import (
    CHECKS,
    FAMILIES,
    Rows,
    check_logprobs,
    check_rows_are_extended,
    padded,
    some_prompts,
    tiny_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from rlhf.rollout.decoders.decoder import Decoder

    Maker = Callable[..., Decoder]

KNOWN = [name for name, family in TABLE.items() if family.block is not None]
FAST = [name for name in FAMILIES if name.partition("-")[0] in KNOWN]
WIDE = {"hidden_size": 64, "intermediate_size": 96, "ffn_dim": 96}  # whole tiles of AMX


def family(
    model: PreTrainedModel, rows: int, tokens: int, dtype: torch.dtype = torch.float32
) -> FusedDecoder:
    parts = find_decoder_modules(model, tokens=tokens)
    assert parts is not None
    return FusedDecoder(parts, adapter_of, rows=rows, tokens=tokens, dtype=dtype)


def compiled(
    model: PreTrainedModel, rows: int, tokens: int, dtype: torch.dtype = torch.float32
) -> CompiledDecoder:
    parts = find_decoder_modules(model, tokens=tokens)
    assert parts is not None
    if not can_compile(parts, dtype):
        pytest.skip("this CPU has no AVX2, or there is no C compiler")
    return CompiledDecoder(parts, adapter_of, rows=rows, tokens=tokens, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("make", [family, compiled])
def test_it_decodes_as_the_model_does(make: Maker, name: str) -> None:
    model = tiny_model(name)
    for check in CHECKS:
        check(model, make)


# Blocks one after the other instead of side by side, and heads of which a part is rotated.
VARIANTS: list[dict[str, Any]] = [
    {"use_parallel_residual": False},
    {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
]


@pytest.mark.parametrize("make", [family, compiled])
@pytest.mark.parametrize("fields", VARIANTS, ids=["sequential", "partial"])
def test_variants_of_gpt_neox(make: Maker, fields: dict[str, Any]) -> None:
    model = tiny_model("gpt_neox", **fields)
    check_rows_are_extended(model, make)
    check_logprobs(model, make)


@pytest.mark.parametrize("level", [Isa.avx2, Isa.avx512_bf16])
def test_every_instruction_set_decodes(level: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    if level >= read_cpu().isa:
        pytest.skip(f"{level.name} is this CPU's own, or it has none")
    monkeypatch.setenv(MAX_ISA, level.name)
    for name in FAST:
        check_rows_are_extended(tiny_model(name), compiled)


def test_odd_sizes_and_gpus_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = find_decoder_modules(tiny_model("opt", ffn_dim=27), tokens=24)
    even = find_decoder_modules(tiny_model("opt"), tokens=24)
    assert odd is not None
    assert even is not None
    assert not can_compile(odd, torch.bfloat16)
    assert not can_compile(even, torch.float16)
    monkeypatch.setenv(MAX_ISA, "none")
    assert not can_compile(even, torch.bfloat16)


@pytest.mark.parametrize("make", [family, compiled])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_new", "silu"])
def test_activations(activation: str, make: Maker) -> None:
    for name, key in (("opt", "activation_function"), ("llama", "hidden_act")):
        check_rows_are_extended(tiny_model(name, **{key: activation}), make)


@pytest.mark.slow
def test_plain_projections_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.rollout.decoders.layers.can_pack_weights", lambda *_: False)
    monkeypatch.setattr(projections, "can_pack_weights", lambda *_: False)
    for name in FAST:
        check_rows_are_extended(tiny_model(name), family)


def cached(
    model: PreTrainedModel, rows: int, tokens: int, dtype: torch.dtype = torch.float32
) -> CacheDecoder:
    device = torch.device("cpu")
    return CacheDecoder(model.to(dtype), rows=rows, tokens=tokens, device=device, dtype=dtype)


@pytest.mark.parametrize("make", [family, compiled, cached])
@pytest.mark.parametrize("name", ["opt-350m", "llama", "bloom"])
@torch.no_grad()
def test_fp32_logits_round_to_those_of_half_precision(name: str, make: Maker) -> None:
    if make is not cached and name not in FAST:
        pytest.skip("only the model's own forward pass decodes this family")
    prompts = padded(some_prompts())
    whole, rounded = (
        make(LanguageModel(tiny_model(name), fp32_logits=keeps).pretrained, 4, 24, torch.bfloat16)
        for keeps in (True, False)
    )
    ids, positions = torch.tensor([7, 8, 9, 10]), prompts.lengths
    for step in (
        lambda decoder: decoder.prefill(prompts, first_row=0),
        lambda decoder: decoder.decode(ids, positions),
    ):
        exact_NV, half_NV = step(whole), step(rounded)
        assert (exact_NV.dtype, half_NV.dtype) == (torch.float32, torch.bfloat16)
        assert not exact_NV.equal(exact_NV.bfloat16().float())
        # Sums in another order may round to the neighbour.
        assert ((exact_NV - half_NV).abs() <= 2**-8 * half_NV.abs() + 1e-4).all()


@pytest.mark.parametrize("make", [family, compiled])
@pytest.mark.parametrize("name", FAST)
def test_half_precision_is_off_by_its_rounding_alone(name: str, make: Maker) -> None:
    model = tiny_model(name, **WIDE, initializer_range=0.1)
    reference = model.bfloat16().float()  # the weights that both have
    rows = Rows(reference, make(model, 4, 24, torch.bfloat16))
    with torch.no_grad():
        rows.join(some_prompts())
        for _ in range(4):
            rows.grow_greedily()
        rows.leave(1)
        rows.grow_and_join([5, 6, 7], some_prompts((6,)))
        rows.logits = [logits_V.float() for logits_V in rows.logits]
        rows.check(half=0.25)  # logits of about 5, 8 bits


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt2", {}),
        ("mistral", {"sliding_window": 8}),
        ("opt", {"activation_function": "tanh"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
)
def test_what_differs_is_left_to_the_general_decoder(name: str, fields: dict[str, object]) -> None:
    parts = find_decoder_modules(tiny_model(name, **fields), tokens=24)
    assert parts is None or parts.activation not in ACTIVATIONS


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("opt", {"num_key_value_heads": 2}),
        ("opt", {"head_dim": 8}),
        ("gpt_neox", {"num_key_value_heads": 1}),
        ("llama", {"head_dim": 8}),
    ],
)
@torch.no_grad()
def test_sizes_come_from_the_weights(name: str, fields: dict[str, Any]) -> None:
    """Fields that a family does not read stay in a config.json by copying or conversion."""
    model = tiny_model(name, **fields)
    query, key, *_ = find_decoder_modules(model, tokens=24).blocks[0].query_key_value * 2
    parts, joined = find_decoder_modules(model, tokens=24), 3 if key is query else 1
    assert parts.num_heads * parts.head_dim == query.out_features // joined
    assert parts.num_kv_heads * parts.head_dim == key.out_features // joined
    check_logprobs(model, compiled)


def test_a_window_is_one_whatever_another_family_would_read() -> None:
    model = tiny_model("mistral", sliding_window=8, use_sliding_window=False)
    assert find_decoder_modules(model, tokens=24) is None


def grown(module: Any) -> None:
    """Let a module have one row more than its neighbours need."""
    for name, weight in list(module.named_parameters(recurse=False)):
        setattr(module, name, torch.nn.Parameter(torch.cat([weight, weight[:1]])))


def widened(module: Any) -> None:
    """Let a module have one column more than its neighbours give."""
    module.weight = torch.nn.Parameter(torch.cat([module.weight, module.weight[:, :1]], dim=1))


def with_three_key_heads(parts: Any) -> Any:
    """Return parts whose 4 query heads cannot share 3 key heads, which the weights have."""
    for block in parts.blocks:
        for module in block.query_key_value[1:]:
            module.weight = torch.nn.Parameter(
                torch.cat([module.weight, module.weight[: parts.head_dim]])
            )
    return replace(parts, num_kv_heads=3)


ODD: dict[str, Callable[[Any], Any]] = {
    "key heads": lambda parts: replace(parts, num_kv_heads=1),
    "uneven heads": with_three_key_heads,
    "no key head": lambda parts: replace(parts, num_kv_heads=0),
    "head size": lambda parts: replace(parts, head_dim=2),
    "a key projection": lambda parts: grown(parts.blocks[1].query_key_value[1]),
    "an output": lambda parts: grown(parts.blocks[1].output),
    "a gate": lambda parts: grown(parts.blocks[1].gate),
    "a norm": lambda parts: grown(parts.blocks[1].mlp_norm),
    "the last norm": lambda parts: grown(parts.final[0]),
    "a norm of keys": lambda parts: grown(parts.blocks[1].key_norm),
    "the embeddings": lambda parts: widened(parts.tokens),
    "the head": lambda parts: widened(parts.head),
    "a bias": lambda parts: setattr(parts.blocks[0].up, "bias", torch.nn.Parameter(torch.ones(23))),
}


@pytest.mark.parametrize("builder", [CompiledDecoder, FusedDecoder])
@pytest.mark.parametrize("odd", ODD)
def test_weights_that_do_not_fit_reach_no_kernel(odd: str, builder: Any) -> None:
    """The kernels check no bounds."""
    parts = find_decoder_modules(tiny_model("qwen3"), tokens=24)
    parts = ODD[odd](parts) or parts
    with pytest.raises(CapabilityError, match="rollout=hf"):
        builder(parts, adapter_of, rows=2, tokens=24, dtype=torch.float32)


@pytest.mark.parametrize("level", [Isa.avx2, Isa.avx512_bf16, Isa.amx])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["opt", "llama", "gpt_neox"])
@torch.no_grad()
def test_neighbours_change_no_bit_of_a_compiled_row(
    name: str, dtype: torch.dtype, level: Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environments answer when they like: what shares a pass must not matter, or no run repeats."""
    if level > read_cpu().isa:
        pytest.skip(f"this CPU has no {level.name}")
    monkeypatch.setenv(MAX_ISA, level.name)
    model = tiny_model(name, **WIDE)
    prompts = some_prompts((5, 9, 3, 12, 7, 4, 8, 11, 2, 6, 10, 5, 3, 9, 4, 7, 8, 6, 5, 13))
    assert CompiledDecoder.rows_are_exact
    alone: dict[int, torch.Tensor] = {}
    for count in (1, 2, 5, 17, 20):
        rows = Rows(model, compiled(model, 32, 32, dtype))
        rows.join(prompts[:count])
        rows.grow([20 + row for row in range(count)])
        if count > 1:  # the newest token of the first row beside a text for the last one
            held = rows.park(count - 1, 31)
            rows.resume([(31, held)], [[11, 12, 13]])
            rows.grow([40 + row for row in range(count)])
        else:
            rows.grow([40])
        for row, logits_V in enumerate(rows.logits[: max(1, count - 1)]):
            assert torch.equal(logits_V, alone.setdefault(row, logits_V))
