"""Attention by matrix products is eager attention, forward and backward, wherever it steps in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.kernels.cpu.cpu_layers import LONGEST, MATMUL, matmul_attention
from rlhf.models.build import ModelSource, build_actor
from tests.models_on_disk import FAMILIES, SMALL, disturb, small_tokenizer, some_ids, source_of
from tests.rounding import assert_near, terms_of

# Forwards and backwards: scores of 8 products, the softmax and the mixture of 9 tokens, 4 groups.
TERMS = 2 * 4 * (8 + 9 + 9)
CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()
LENGTHS = torch.tensor([9, 5, 7])[:, None]
RIGHT = torch.arange(9) < LENGTHS
LEFT = torch.arange(9) >= 9 - LENGTHS
# Diagonals let a padding token see itself, as the masks of transformers do.
SEEN = {
    "none": None,
    "right": (CAUSAL & RIGHT[:, None])[:, None],
    "left": (CAUSAL & (LEFT[:, None] | torch.eye(9, dtype=torch.bool)))[:, None],
}


class Layer(nn.Module):
    """What transformers hands over as the module."""

    def __init__(self, *, is_causal: bool = True, groups: int = 1) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.num_key_value_groups = groups


def heads(
    tokens: int = 9, *, of_keys: int = 4, dtype: torch.dtype = torch.float32, width: int = 8
) -> list[Tensor]:
    """Queries (3, 4, tokens, 8), keys and values."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(3, 4, tokens, 8), (3, of_keys, tokens, 8), (3, of_keys, tokens, width)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def slowly(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scaling: float = 8**-0.5
) -> Tensor:
    """softmax(q k^T) v in fp32, written out; returns (B, S, N, D)."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * scaling
    scores = scores.masked_fill(~(CAUSAL if seen is None else seen), -1e30)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def with_gradients(mixed: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, mixed.numel()).view(mixed.shape)
    return [mixed, *torch.autograd.grad((mixed * weight).sum(), tensors)]


@pytest.fixture
def fallbacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens SDPA was asked for, call by call."""
    from transformers.integrations import sdpa_attention

    calls: list[int] = []
    original = sdpa_attention.sdpa_attention_forward

    def counted(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(query.shape[2])
        return original(module, query, *args, **kwargs)

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", counted)
    return calls


@pytest.mark.parametrize("padding", SEEN)
@pytest.mark.parametrize("of_keys", [4, 2, 1])
@pytest.mark.parametrize("is_additive", [False, True])
def test_values_and_gradients_are_those_written_out(
    padding: str, of_keys: int, is_additive: bool, fallbacks: list[int]
) -> None:
    seen, tensors = SEEN[padding], heads(of_keys=of_keys)
    mask = seen
    if is_additive and seen is not None:
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    mixed, shares = matmul_attention(Layer(groups=4 // of_keys), *tensors, mask, scaling=0.3)
    assert shares is None
    assert not fallbacks
    expected = slowly(*tensors, seen, scaling=0.3)
    got, want = (with_gradients(each, tensors) for each in (mixed, expected))
    assert_near(got, want, terms=TERMS)


def test_bf16_is_as_near_as_sdpa_is(fallbacks: list[int]) -> None:
    tensors = heads(of_keys=2, dtype=torch.bfloat16)
    mixed, _ = matmul_attention(Layer(groups=2), *tensors, SEEN["left"])
    assert mixed.dtype is torch.bfloat16
    assert not fallbacks
    expected = with_gradients(slowly(*tensors, SEEN["left"]), tensors)
    for ours, exact in zip(with_gradients(mixed, tensors), expected, strict=True):
        torch.testing.assert_close(ours.float(), exact.float(), atol=0.05, rtol=0.03)


def test_a_token_that_sees_nothing_is_not_nan() -> None:
    seen = (CAUSAL & LEFT[:, None])[:, None]
    tensors = heads()
    mixed, _ = matmul_attention(Layer(), *tensors, seen)
    assert all(tensor.isfinite().all() for tensor in with_gradients(mixed, tensors))


@pytest.mark.parametrize(
    ("tensors", "layer", "options"),
    [
        (heads(LONGEST + 1), Layer(), {}),
        (heads(1), Layer(), {}),
        (heads(), Layer(), {"dropout": 0.5}),
        (heads(), Layer(), {"is_causal": False}),
        (heads(), Layer(is_causal=False), {}),
        (heads(width=4), Layer(), {}),
        (heads(), Layer(), {"position_bias": torch.ones(1, 4, 9, 9).triu()}),
        ([heads(2)[0], *heads()[1:]], Layer(), {}),  # two new tokens and a cache
    ],
    ids=["long", "one", "dropout", "both_ways", "layer_both_ways", "narrow", "bias", "cache"],
)
def test_all_else_is_left_to_sdpa(
    tensors: list[Tensor], layer: Layer, options: dict[str, Any], fallbacks: list[int]
) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    results = []
    for function in (matmul_attention, sdpa_attention_forward):
        torch.manual_seed(0)
        results.append(function(layer, *tensors, None, **options)[0])
    torch.testing.assert_close(results[0], results[1], atol=0.0, rtol=0.0)
    assert fallbacks == [tensors[0].shape[2]] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_what_it_does_with_eager_attention(
    family: str, fallbacks: list[int]
) -> None:
    tokenizer, ids = small_tokenizer(), some_ids(3, 9)
    models = [
        build_actor(source_of(family, attention=name), tokenizer, seed=1)
        for name in (None, "eager")
    ]
    assert models[0].config._attn_implementation == MATMUL
    for model in models:
        disturb(model)  # weights of a new model are so small that all tokens get the same share
    fallbacks.clear()  # the first OPT of a process is probed before it has its attention
    for keep in (torch.ones(3, 9, dtype=torch.bool), RIGHT, LEFT):
        places = (keep.cumsum(1) - 1).clamp(min=0)
        results = []
        for model in models:
            model.zero_grad()
            out = model(input_ids=ids, attention_mask=keep.long(), position_ids=places)
            out.logits[keep].square().sum().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            results.append((out.logits[keep], gradients))
        (ours, our_gradients), (theirs, their_gradients) = results
        assert_near(ours, theirs, terms=terms_of(models[0], 9))
        # Backwards each product is summed once more, and over the tokens of the batch.
        assert_near(our_gradients, their_gradients, terms=2 * terms_of(models[0], 9) + 3 * 9)
    assert not fallbacks


def test_a_model_outside_the_table_keeps_its_own() -> None:
    soft_caps = {"model_type": "gemma2", **SMALL, "num_key_value_heads": 1, "head_dim": 8}
    source = ModelSource(key="model", path=None, architecture=soft_caps)
    model = build_actor(source, small_tokenizer(), seed=1)
    assert model.config._attn_implementation != MATMUL


@pytest.mark.parametrize("asked", [None, MATMUL])
def test_a_saved_model_does_not_name_it(asked: str | None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = build_actor(source_of("llama", attention=asked), small_tokenizer(), seed=1).eval()
    model.save_pretrained(tmp_path)
    assert MATMUL not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    again = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert again.config._attn_implementation != MATMUL
    torch.testing.assert_close(again(some_ids()).logits, model(some_ids()).logits)


@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
def test_generation_with_a_cache_is_that_of_eager_attention(
    family: str, fallbacks: list[int]
) -> None:
    """The prompt goes through matrix products, each further token through SDPA."""
    tokenizer, ids = small_tokenizer(), some_ids(3, 9)
    made: list[Tensor] = []
    length = {"max_new_tokens": 5, "min_new_tokens": 5}
    for name in (MATMUL, "eager"):
        model = build_actor(source_of(family, attention=name), tokenizer, seed=1).eval()
        disturb(model)
        made.append(model.generate(ids, attention_mask=LEFT.long(), do_sample=False, **length))
    assert torch.equal(made[0], made[1])
    assert fallbacks == [1] * 2 * 4  # layers, tokens after the first
