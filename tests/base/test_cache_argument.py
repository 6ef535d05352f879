"""Both names of the KV cache's argument work, whichever the installed transformers uses."""

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from rlhf.base.decoder_modules import CACHE_NAMES, kv_cache_parameter_name
from rlhf.models.build import _call_compiled_unless_kv_cache
from rlhf.options.hybrid_engine.hybrid_rollout import _return_only_hidden_state
from rlhf.rollout.decoders.via_cache import CacheDecoder
from tests.rollout.decoder_checks import Rows, some_prompts, tiny_model

INSTALLED = kv_cache_parameter_name(signature(LlamaForCausalLM.forward).parameters)


class Newer(LlamaForCausalLM):
    """A model whose cache has the name of transformers 5.24."""

    def forward(self, input_ids: Any, position_ids: Any, cache: Any = None, **more: Any) -> Any:
        assert CACHE_NAMES[1] not in more
        return super().forward(
            input_ids=input_ids, position_ids=position_ids, **{str(INSTALLED): cache}, **more
        )


class Older(LlamaForCausalLM):
    """A model whose cache has the name of earlier versions."""

    def forward(
        self, input_ids: Any, position_ids: Any, past_key_values: Any = None, **more: Any
    ) -> Any:
        assert CACHE_NAMES[0] not in more
        found = {str(INSTALLED): past_key_values}
        return super().forward(input_ids=input_ids, position_ids=position_ids, **found, **more)


@pytest.mark.parametrize("kind", [Newer, Older])
def test_a_decoder_passes_its_cache_by_the_model_s_own_name(kind: type[LlamaForCausalLM]) -> None:
    plain = tiny_model("llama")
    model = kind(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    decoder = CacheDecoder(
        model, rows=4, tokens=24, device=torch.device("cpu"), dtype=torch.float32
    )
    rows = Rows(plain, decoder)
    with torch.no_grad():
        rows.join(some_prompts())
        rows.grow_greedily()
        rows.check()


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_layers_find_their_cache_by_both_names(name: str) -> None:
    seen: list[Any] = []
    cache = SimpleNamespace(update=lambda *taken: seen.append(taken))
    assert (
        _call_compiled_unless_kv_cache(lambda **_: "compiled", lambda **_: "plain", **{name: cache})
        == "plain"
    )
    assert (
        _call_compiled_unless_kv_cache(lambda **_: "compiled", lambda **_: "plain", **{name: None})
        == "compiled"
    )
    run = _return_only_hidden_state(lambda hidden, **_: (hidden,), counts_tokens=True)
    run(torch.zeros(2, 3, 4), **{name: cache})
    assert seen[0][0].shape == (1, 1, 3, 1)
