"""Compiled layers compute what plain layers do; a layer with a KV cache is not compiled."""

import pytest
import torch
from torch import nn

from rlhf.base.errors import CapabilityError
from rlhf.models.build import build_actor, compile_layers
from tests.models_on_disk import FAMILIES, small_tokenizer, some_ids, source_of

# The same graphs as of the default backend, run by torch: inductor compiles each for seconds.
BACKEND = "aot_eager"

# What torch.compile warns of while it traces modules of others.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

graphs: list[object] = []


def counted(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
    graphs.append(graph)
    return graph


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        ("opt", False),
        ("llama", True),
        *(pytest.param(f, False, marks=pytest.mark.soak) for f in FAMILIES if f != "opt"),
    ],
)
def test_compiled_layers_have_the_same_gradients(family: str, checkpointing: bool) -> None:
    tokenizer, gradients = small_tokenizer(), []
    for is_compiled in (False, True):
        source = source_of(family, gradient_checkpointing=checkpointing)
        model = build_actor(source, tokenizer, seed=1).train()
        if is_compiled:
            compile_layers(model, key="model", backend=BACKEND)
        model(some_ids(), use_cache=False).logits.square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    plain, compiled = gradients
    assert plain.keys() == compiled.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(compiled[name], gradient)


def test_layers_share_one_graph_per_shape_and_a_cache_has_none() -> None:
    model = build_actor(source_of("llama"), small_tokenizer(), seed=1).eval()
    plain = model.generate(some_ids(), max_new_tokens=3, do_sample=False)
    compile_layers(model, key="model", backend=counted)
    graphs.clear()
    with torch.no_grad():
        for tokens in (4, 8, 4):
            model(some_ids(tokens=tokens), use_cache=False)
    assert len(graphs) == 2
    again = model.generate(some_ids(), max_new_tokens=3, do_sample=False)
    assert torch.equal(again, plain)
    assert len(graphs) == 2, "each step of generation would be a graph of its own"


def test_a_model_without_known_layers_is_refused() -> None:
    with pytest.raises(CapabilityError, match="model: the layers of Linear cannot be found"):
        compile_layers(nn.Linear(2, 2), key="model")
