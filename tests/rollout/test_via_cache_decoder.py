"""The decoder of every model: the shared checks on many families, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from rlhf.base.errors import CapabilityError
from rlhf.rollout.decoders.via_cache import CacheDecoder
from tests.rollout.decoder_checks import (
    CHECKS,
    FAMILIES,
    VOCABULARY,
    Rows,
    check_logprobs,
    check_rows_are_extended,
    some_prompts,
    tiny_model,
)
from tests.rollout.test_fused_decoder import FAST

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU = torch.device("cpu")


def general(
    model: PreTrainedModel, rows: int, tokens: int, dtype: torch.dtype = torch.float32
) -> CacheDecoder:
    return CacheDecoder(model, rows=rows, tokens=tokens, device=CPU, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_it_decodes_as_the_model_does(family: str) -> None:
    """Families that have another decoder need this one where that does not fit them."""
    model = tiny_model(family)
    for check in (check_rows_are_extended,) if family in FAST else CHECKS:
        check(model, general)


def test_eager_attention_is_the_same() -> None:
    check_logprobs(tiny_model("llama", attn_implementation="eager"), general)


def test_it_runs_under_autocast_with_memory_in_half() -> None:
    for family in ("opt", "qwen3", "gpt_neox"):
        model = tiny_model(family)
        rows = Rows(model, general(model, 4, 24, torch.bfloat16))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            rows.join(some_prompts())
            for _ in range(3):
                rows.grow_greedily()
        rows.logits = [logits_V.float() for logits_V in rows.logits]
        with torch.no_grad():
            rows.check(half=0.2)  # bf16 has 8 bits; logits here are about 5


def test_the_output_layer_sees_the_last_tokens_alone() -> None:
    model = tiny_model("llama")
    seen: list[torch.Size] = []
    model.lm_head.register_forward_hook(lambda _, args, output: seen.append(output.shape))
    rows = Rows(model, general(model, 4, 24))
    with torch.no_grad():
        rows.join(some_prompts())
        rows.grow_greedily()
    assert seen == [(4, 1, VOCABULARY)] * 2
    # Nothing is left behind on the model.
    assert model(torch.tensor([[3, 4, 5]])).logits.shape == (1, 3, VOCABULARY)


HYBRID = {"head_dim": 8, "num_key_value_heads": 2}
CONVOLUTION = HYBRID | {"layer_types": ["conv", "full_attention"]}


@pytest.mark.parametrize(
    ("model_type", "fields", "words"),
    [
        ("mistral", {"sliding_window": 23}, "attends to 23 tokens at most, fewer than the 24"),
        ("gemma3_text", {"sliding_window": 8, "head_dim": 8}, "attends to 8 tokens at most"),
        ("gpt_neo", {"attention_types": [[["local"], 2]], "window_size": 8}, "8 tokens at most"),
        ("mamba", {}, "does not cache the keys and values of its tokens"),
        ("qwen3_next", HYBRID, "does not cache the keys and values of its tokens"),
        ("lfm2", CONVOLUTION, "has layers that do not cache the keys and values of all tokens"),
        ("bart", {"d_model": 16}, "has no position_ids argument for the positions of its tokens"),
    ],
)
def test_what_it_cannot_decode_is_refused(
    model_type: str, fields: dict[str, Any], words: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    config = AutoConfig.for_model(model_type, **size | {"num_layers": 2, "num_heads": 4} | fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(CapabilityError, match=words) as error:
        general(model, 4, 24)
    assert f"model_type={model_type}" in str(error.value)
    assert "rollout=hf" in str(error.value)


def test_an_encoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1))
    with pytest.raises(CapabilityError, match="model_type=t5 has an encoder; use rollout=hf"):
        general(model, 4, 24)


def test_a_window_as_long_as_a_row_is_accepted() -> None:
    check_logprobs(tiny_model("mistral", sliding_window=24), general)
