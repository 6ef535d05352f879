"""Liger's layers by Triton's interpreter, on a CPU; gpu_kernels/test_triton.py starts it.

Models with these layers compute the hidden states and gradients that they compute without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from liger_kernel.ops import rms_norm
from torch import Tensor
from triton import language as tl
from triton.runtime import interpreter

from rlhf.base.types import TokenPositions
from rlhf.models.build import enable_gradient_checkpointing
from rlhf.models.families import find_decoder_modules
from rlhf.models.language_model import LanguageModel
from rlhf.options.fused_layers import liger_layers
from rlhf.options.fused_layers.liger_layers import BOUND, FAMILIES, compare_layer, replace_layers
from rlhf.options.lora.models import adapter_of, add_adapters
from rlhf.rollout.decoders.decoder import Texts
from rlhf.rollout.decoders.fused import FusedDecoder
from tests.lora_settings import lora_config
from tests.rollout.decoder_checks import tiny_model
from tests.rounding import assert_near, terms_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IDS = torch.tensor([[5, 9, 3], [7, 4, 8]])


@pytest.fixture(autouse=True)
def _as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter do two things that only the compiler does.

    It makes tensors of numbers that are arguments, and has the functions of CUDA's library.
    """
    convert = interpreter._implicit_cvt

    def to_tensor(argument: object) -> object:
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", to_tensor)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: 1 / tl.sqrt(x))


@pytest.fixture(autouse=True)
def _rotary_embeddings() -> Iterator[None]:
    """Give the families back their own."""
    modules = [import_module(f"transformers.models.{name}.modeling_{name}") for name in FAMILIES]
    before = [dict(vars(module)) for module in modules]
    yield
    for module, names in zip(modules, before, strict=True):
        vars(module).update(names)


def passes(model: PreTrainedModel) -> dict[str, Tensor]:
    """The hidden states and the gradients of a loss."""
    model.zero_grad()
    hidden = model.base_model(input_ids=IDS, use_cache=False).last_hidden_state
    weights = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    (hidden * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach()} | {name: grad.clone() for name, grad in found.items()}


def assert_equal(model: PreTrainedModel, expected: dict[str, Tensor]) -> None:
    found, terms = passes(model), terms_of(model, IDS.numel())
    assert found.keys() == expected.keys()
    for name, each in found.items():
        assert_near(each, expected[name], terms=terms)


@pytest.mark.parametrize("family", FAMILIES)
def test_they_compute_what_torch_does(family: str) -> None:
    model = tiny_model(family, num_hidden_layers=1)
    expected = passes(model)
    replace_layers(model)
    assert_equal(model, expected)


def test_a_layer_is_compared_before_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3")

    def worst() -> float:
        pairs = compare_layer(model, torch.device("cpu"), torch.float16)
        assert len(pairs) > 10
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)

    assert worst() < BOUND
    real = liger_layers.replace_layers

    def replace_wrongly(model: PreTrainedModel) -> None:
        real(model)
        model.model.norm.weight.data.mul_(1.2)

    monkeypatch.setattr(liger_layers, "replace_layers", replace_wrongly)
    assert worst() > BOUND


def test_in_half_precision() -> None:
    """As near to fp32 as torch's own fp16 is; the interpreter does not multiply bf16."""
    exact, model = (tiny_model("llama", num_hidden_layers=1) for _ in range(2))
    expected, plain = passes(exact), passes(model.half())
    replace_layers(model)
    for name, each in passes(model).items():
        error, allowed = (torch.dist(x.float(), expected[name]) for x in (each, plain[name]))
        assert error <= 2 * allowed, name


def test_with_adapters_and_activations_computed_again() -> None:
    model = tiny_model("llama", num_hidden_layers=1, attention_bias=True)
    add_adapters(model, lora_config(), seed=1)
    enable_gradient_checkpointing(model.train(), True, key="model")
    expected = passes(model)
    assert any("lora_B" in name for name in expected)
    replace_layers(model)
    assert_equal(model, expected)


def test_log_probabilities_stay_ours() -> None:
    plain, fused = (LanguageModel(tiny_model("llama", num_hidden_layers=1)) for _ in range(2))
    replace_layers(fused.pretrained)
    assert "forward" not in vars(fused.pretrained)
    positions = TokenPositions(torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([9, 8]))
    expected, found = (model(IDS, positions).logprobs_N for model in (plain, fused))
    assert_near(found, expected, terms=terms_of(plain, IDS.numel()))


@torch.no_grad()
def test_decoding_does_not_change() -> None:
    logits = []
    for replaces in (False, True):
        model = tiny_model("llama", num_hidden_layers=1)
        if replaces:
            replace_layers(model)
        parts = find_decoder_modules(model, tokens=8)
        assert parts is not None
        decoder = FusedDecoder(parts, adapter_of, rows=2, tokens=8, dtype=torch.float32)
        logits.append(decoder.prefill(Texts(IDS, [3, 2]), first_row=0))
    assert torch.equal(*logits)


def test_models_built_later_keep_their_classes() -> None:
    """Liger's MLP has no bias."""
    replace_layers(tiny_model("llama", num_hidden_layers=1))
    later = tiny_model("llama", num_hidden_layers=1, mlp_bias=True)
    assert "mlp.up_proj.bias" in dict(later.model.layers[0].named_parameters())
