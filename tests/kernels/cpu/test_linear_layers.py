"""Products by oneDNN: values and gradients are those of nn.Linear."""

import pytest
import torch
from torch import nn

from rlhf.base.cpu import Isa, read_cpu
from rlhf.kernels.cpu import cpu_layers
from rlhf.kernels.cpu.cpu_layers import OnednnLinear
from rlhf.models.build import build_actor
from tests.models_on_disk import small_tokenizer, source_of

pytestmark = pytest.mark.skipif("avx2" not in read_cpu().flags, reason="no AVX2")


@pytest.fixture(autouse=True, params=[Isa.avx2, Isa.avx512_bf16], ids=lambda isa: isa.name)
def _slow_mkl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_layers, "has_slow_mkl", lambda: True)
    monkeypatch.setattr(cpu_layers, "onednn_isa", lambda: request.param)


def refuse(*_: object) -> None:
    raise AssertionError("torch's own product was used")


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("frozen", ["", "x", "weight"])
def test_values_and_gradients(has_bias: bool, frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    layer, exact = OnednnLinear(24, 17, bias=has_bias), nn.Linear(24, 17, bias=has_bias).double()
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3, 24).transpose(0, 1).requires_grad_(frozen != "x")
    exact_x = x.detach().double().requires_grad_(frozen != "x")
    slope = torch.randn(3, 5, 17)
    for each in (layer, exact):
        each.weight.requires_grad_(frozen != "weight")
    expected = exact(exact_x)
    expected.backward(slope.double())
    monkeypatch.setattr(nn.functional, "linear", refuse)
    found = layer(x)
    found.backward(slope)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    pairs = [(x, exact_x), *zip(layer.parameters(), exact.parameters(), strict=True)]
    for own, right in pairs:
        assert (own.grad is None) == (right.grad is None)
        if own.grad is not None and right.grad is not None:
            torch.testing.assert_close(own.grad.double(), right.grad, atol=1e-5, rtol=1e-5)


def test_a_model_uses_them_in_all_layers_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer()

    def layers() -> list[nn.Module]:
        model = build_actor(source_of("llama"), tokenizer, seed=1)
        return [each for each in model.modules() if isinstance(each, nn.Linear)]

    assert [type(each) for each in layers()] == [OnednnLinear] * (len(layers()) - 1) + [nn.Linear]
    monkeypatch.setattr(cpu_layers, "has_slow_mkl", lambda: False)
    assert {type(each) for each in layers()} == {nn.Linear}
